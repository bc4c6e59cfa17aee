"""Read files of `torch.save`: Meta's `consolidated.*.pth`, and a `.pt` file of any program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from torchtitan_like.checkpoint.dcp_metadata import as_checkpoint_error
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.source import Read, Source, TensorInfo
from torchtitan_like.checkpoint.unpickle import load_saved
from torchtitan_like.util.boxes import box_at, slices


class PthSource(Source):
    """The tensors of one or more files, which are memory-mapped: only what is read is resident.

    parts: name -> (offsets in the tensor, values) of each file that has a part of it.
    objects: name -> value. state: the nested content of a single file.
    """

    format = "pt"

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, TensorInfo],
        parts: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]],
        objects: Mapping[str, Any] | None = None,
        state: Any = None,
    ) -> None:
        self._objects = objects or {}
        super().__init__(path, stored, self._objects)
        self._parts = parts
        self._state = state

    def fill(self, reads: Iterable[Read]) -> None:
        for read in reads:
            for offsets, values in self._parts[read.name]:
                if part := read.within(box_at(offsets, values.shape)):
                    part.target.copy_(values[slices(part.box)])

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._objects[name] for name in names}

    def read(self, name: str) -> Any:
        return self._parts[name][0][1] if name in self._parts else self._objects[name]

    def read_all(self) -> Any:
        return self._state


def open_pt(path: Path, *, trust: bool = False) -> PthSource:
    """Open a `.pt` file with names of nested entries joined by dots. trust: unpickle any class."""
    state = load_saved(path, path, trust=trust, mmap=is_zipfile(path))
    size = path.stat().st_size
    values: dict[str, Any] = {}
    with as_checkpoint_error(path):
        for count, (name, value) in enumerate(flatten(state)):
            if count > size:  # each dict contains others twice
                raise ValueError(f"it has {size:,} bytes, but more values")
            if isinstance(value, Tensor) and value.layout == torch.strided:
                _refuse_repeated(name, value)
            values[name] = value
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    stored = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    parts = {name: [((0,) * tensor.ndim, tensor)] for name, tensor in tensors.items()}
    objects = {name: value for name, value in values.items() if name not in tensors}
    return PthSource(path, stored, parts, objects, state)


def _refuse_repeated(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a view that repeats its numbers: a copy would take any memory."""
    num_bytes, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if num_bytes > stored:
        raise ValueError(f"{name} of {list(tensor.shape)} has {num_bytes:,} bytes in {stored:,}")


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, child in value.items():
        yield from flatten(child, f"{prefix}.{name}" if prefix else str(name))


def open_meta(path: Path) -> PthSource:
    """Open a `.pth` file, or a folder with `consolidated.00.pth`, ..., of model-parallel ranks."""
    files = [path] if path.is_file() else sorted(path.glob("consolidated.*.pth"))
    if not files:
        raise CheckpointError(
            f"{path} contains no consolidated.*.pth. Expected such a file, or a folder of them"
        )
    expected = [path]
    if not path.is_file():
        expected = [path / f"consolidated.{i:02d}.pth" for i in range(len(files))]
    if files != expected:
        raise DamagedError(
            f"{path} is incomplete: it has only {', '.join(file.name for file in files)}"
        )
    states = [_map_file(file) for file in files]
    for file, state in zip(files, states, strict=True):
        if differing := state.keys() ^ states[0].keys():
            raise DamagedError(
                f"{file} and {files[0]} contain different tensors: {sorted(differing)}"
            )
    dim = states[0]["norm.weight"].shape[0] if "norm.weight" in states[0] else 0
    stored, parts = {}, {}
    for name in states[0]:
        values = [state[name] for state in states]
        if len({(part.shape, part.dtype) for part in values}) > 1:
            raise DamagedError(f"{path}: {name} differs in shape or dtype between files")
        split_dim = _split_dim(name, values[0], dim)
        if split_dim is None:
            if not all(torch.equal(part, values[0]) for part in values[1:]):
                raise DamagedError(
                    f"{path}: the values of {name} differ between files, but it is not split"
                )
            values = values[:1]
        shape = [n * len(values) if d == split_dim else n for d, n in enumerate(values[0].shape)]
        steps = [values[0].shape[d] if d == split_dim else 0 for d in range(len(shape))]
        stored[name] = TensorInfo(tuple(shape), values[0].dtype)
        parts[name] = [(tuple(i * step for step in steps), part) for i, part in enumerate(values)]
    return PthSource(path, stored, parts)


def _split_dim(name: str, part: Tensor, dim: int) -> int | None:
    """Return the dimension along which the files split a tensor; None if each has the whole tensor.

    The rules follow github.com/meta-llama/llama-models: wo and w2 are row-parallel, the other
    matrices are column-parallel, and vectors are not split. Llama 3 splits the embedding by rows,
    earlier models by columns. `dim` is the model's width.
    """
    if part.ndim != 2:
        return None
    if name.endswith(("wo.weight", "w2.weight")):
        return 1
    return 1 if name.startswith("tok_embeddings") and part.shape[1] != dim else 0


def _map_file(file: Path) -> dict[str, Tensor]:
    if not is_zipfile(file):
        raise DamagedError(f"{file} is not a zip file of torch.save. It may be truncated")
    state = load_saved(file, file, mmap=True)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{file} contains a {type(state).__name__}. Expected a state dict: name -> tensor"
        )
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
