"""CUDA graphs on CPU: a capture records operators, and a replay calls them with the same tensors.

As on a GPU, a capture leaves all existing tensors and the random state as they were, and new tensors
without values. Python does not run again, and a read on the host is an error. Storages stay what they were: a replay writes its
results into those of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Functions of a tensor that return a value to the host.
HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
# Operators that do, or whose output's shape depends on values.
HOST_OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "is_nonzero",
    "equal",
)


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in HOST_READS, f"the host reads a tensor by {name}"
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records all calls of operators, their arguments, and results. Refuses reads on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.created: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # an existing tensor, and its copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split("::")[1].split(".")[0]
        assert name not in HOST_OPERATORS, f"{name} reads values on the host"
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in _tensors([written, kwargs.get("out")]):
            if _storage(tensor) not in self.created and _storage(tensor) not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[_storage(tensor)] = whole, whole.clone()
        out = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in _tensors([args, kwargs])}
        for tensor in _tensors(out):
            if _storage(tensor) not in known:
                self.created[_storage(tensor)] = tensor
        self.calls.append((func, args, kwargs, out))
        return out

    @property
    def operators(self) -> list[Any]:
        """The names of the calls, and their arguments: a tensor is its dtype and shape."""

        def described(value: Any) -> Any:
            is_tensor = isinstance(value, Tensor)
            return (str(value.dtype), tuple(value.shape)) if is_tensor else str(value)

        return [
            (func.name(), tree_map(described, (args, kwargs)))
            for func, args, kwargs, _ in self.calls
        ]

    def undo(self) -> None:
        """Give tensors from before their values back, and fill new ones with NaN, -1 and True."""
        for whole, copy in self.before.values():
            whole.copy_(copy)
        for tensor in self.created.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(255)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record operators, and refuse to read tensors on the host."""
    recorder = Recorder()
    with _NoHostReads(), recorder:
        yield recorder


class CPUGraph:
    """A `torch.cuda.CUDAGraph` on CPU. num_replays: of all graphs since `use_cpu_graphs`."""

    num_replays = 0
    recorder: Recorder

    @torch.no_grad()
    def replay(self) -> None:
        CPUGraph.num_replays += 1
        for func, args, kwargs, out in self.recorder.calls:
            results = _tensors(func(*args, **kwargs))
            for old, new in zip(_tensors(out), results, strict=True):
                if _storage(old) != _storage(new):
                    old.copy_(new)


@contextmanager
def _capture(graph: CPUGraph, **options: Any) -> Iterator[None]:
    random_state = torch.get_rng_state()
    with recording() as graph.recorder:
        yield
    graph.recorder.undo()
    torch.set_rng_state(random_state)


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        """Do nothing: work on a CPU ends before the next one starts."""


def use_cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what `util.cuda_graphs` uses of `torch.cuda`."""
    enter: Callable[[_Stream], AbstractContextManager[None]] = lambda stream: nullcontext()  # noqa: E731
    replacements: dict[str, Any] = {
        "Stream": _Stream,
        "stream": enter,
        "current_stream": _Stream,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": CPUGraph,
        "graph": _capture,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(CPUGraph, "num_replays", 0)
