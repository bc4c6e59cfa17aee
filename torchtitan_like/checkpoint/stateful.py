"""The state of a run: one `Stateful` object per key of `checkpoint.exclude_from_loading`.

State dicts contain the live tensors, so that a checkpoint is loaded in place. Other state is one
JSON string per key, which is the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

StateDict = dict[str, Any]


class Stateful(Protocol):
    """The protocol of `torch.distributed.checkpoint.stateful.Stateful`, without the import."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> None: ...


class ModelState:
    """The parameters and persistent buffers of this rank's model parts, by canonical name.

    A tied weight appears once.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = tuple(parts)

    def state_dict(self) -> StateDict:
        """Return the live tensors (DTensor where sharded)."""
        seen: set[int] = set()
        state: StateDict = {}
        for part in self.parts:
            for name, tensor in part.state_dict(keep_vars=True).items():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    state[name] = tensor
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy `state_dict` into the live tensors. Tensors that were read in place are skipped."""
        for name, tensor in self.state_dict().items():
            if state_dict[name] is not tensor:
                tensor.copy_(state_dict[name])


@dataclass(frozen=True)
class JsonState:
    """Small global state (step, token count, data position): read by `get`, restored by `put`."""

    get: Callable[[], dict[str, Any]]
    put: Callable[[dict[str, Any]], None]

    def state_dict(self) -> StateDict:
        return {"json": json.dumps(self.get())}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.put(json.loads(state_dict["json"]))


@dataclass(frozen=True)
class Progress:
    """The run's progress, which is the same on every rank and topology."""

    step: int = 0
    n_tokens_seen: int = 0
    position: int = 0  # samples consumed
    digest_chain: int = 0
