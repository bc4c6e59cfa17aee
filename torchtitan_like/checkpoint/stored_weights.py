"""The weights and averaged weights of a native step, and tensors on the host to load them into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.source import TensorInfo

PREFIX = "model."  # of the names of weights in a native step
# Key of the state. A step has averaged weights if its manifest has this entry.
EMA_KEY = "ema"
_AVERAGE_PREFIX = f"{EMA_KEY}.average."


def average_entries(stored: Iterable[str]) -> dict[str, str]:
    """Return the entries of averaged weights by the names of the weights' entries.

    stored: names of entries in a native step. Tensors that are not trained have no average.
    """
    return {
        f"{PREFIX}{name.removeprefix(_AVERAGE_PREFIX)}": name
        for name in stored
        if name.startswith(_AVERAGE_PREFIX)
    }


def check_average(step: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a native step has averaged weights."""
    if EMA_KEY not in manifest or manifest["kind"] == "hf":
        raise CheckpointError(
            f"{step} has no averaged weights. Expected a step of a run with ema.enable = true: leave "
            "out --ema, or choose such a step"
        )


class HostTensors:
    """Empty tensors of the given shapes and dtypes, as a `Stateful` that is filled in place."""

    def __init__(self, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        self._tensors = {
            name: torch.empty(tuple(shape), dtype=dtype) for name, (shape, dtype) in tensors.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        is_in_place = all(state_dict[name] is tensor for name, tensor in self._tensors.items())
        assert is_in_place, "the tensors are filled in place"


class StoredWeights(HostTensors):
    """The weights of a native step in the dtypes they are stored in; each rank holds some of them.

    Every tensor is whole on one rank. Sizes are balanced over the ranks: the largest tensor goes
    first, each to the rank with the fewest bytes so far.
    """

    def __init__(
        self,
        stored: Mapping[str, TensorInfo],
        rank: int,
        world_size: int,
        *,
        averaged: bool = False,
    ) -> None:
        """stored: the tensors of the step, by name. averaged: see `Start`."""
        entries = average_entries(stored) if averaged else {}
        weights = {
            name: stored[entries.get(name, name)] for name in stored if name.startswith(PREFIX)
        }
        sizes = {n: math.prod(info.shape) * info.dtype.itemsize for n, info in weights.items()}
        loads = [0] * world_size
        local: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            holder = loads.index(min(loads))
            loads[holder] += sizes[name]
            if holder == rank:
                local[name.removeprefix(PREFIX)] = weights[name].shape, weights[name].dtype
        super().__init__(local)
        self.num_bytes = sum(sizes.values())  # of all ranks
