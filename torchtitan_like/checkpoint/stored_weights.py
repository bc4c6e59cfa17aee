"""The weights of a native step, read without a model: each rank holds some of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PREFIX = "model."


class StoredWeights:
    """Tensors to load a step's weights into, in the types they are stored in.

    Every tensor is whole on one rank. Sizes are balanced over the ranks: the largest tensor goes
    first, each to the rank with the fewest bytes so far.
    """

    def __init__(self, stored: Mapping[str, Any], rank: int, world_size: int) -> None:
        """`stored`: the entries of DCP's metadata, by name."""
        weights = {
            name: entry
            for name, entry in stored.items()
            if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        sizes = {n: e.size.numel() * e.properties.dtype.itemsize for n, e in weights.items()}
        loads = [0] * world_size
        self._tensors: dict[str, Any] = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            holder = loads.index(min(loads))
            loads[holder] += sizes[name]
            if holder == rank:
                size, dtype = weights[name].size, weights[name].properties.dtype
                self._tensors[name.removeprefix(PREFIX)] = torch.empty(size, dtype=dtype)
        self.num_bytes = sum(sizes.values())  # of all ranks

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        is_in_place = all(state_dict[name] is tensor for name, tensor in self._tensors.items())
        assert is_in_place, "the tensors are filled in place"
