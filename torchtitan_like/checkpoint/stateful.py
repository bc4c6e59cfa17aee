"""What a checkpoint holds, as torch's `Stateful` objects: one per key of `checkpoint.exclude_from_loading`.

Tensors keep their live storage, so that a checkpoint is read in place; everything else is one JSON string per key,
global and the same on every rank.
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
    """As `torch.distributed.checkpoint.stateful.Stateful`, without importing it."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> None: ...


class ModelState:
    """All parameters and persistent buffers of this rank's parts of the model by canonical name; a tied weight once."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = tuple(parts)

    def state_dict(self) -> StateDict:
        """The live tensors (DTensor where sharded)."""
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
        """Copy in what is not live already: a checkpoint read in place needs no copy."""
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
    """Where the run is: global, small, the same on every rank and on every topology."""

    step: int = 0
    n_tokens_seen: int = 0
    position: int = 0  # samples consumed
    digest_chain: int = 0
