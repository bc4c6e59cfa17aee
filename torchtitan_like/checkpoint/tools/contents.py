"""Open a checkpoint of any format as a table of names and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_like.checkpoint.dcp_metadata import as_checkpoint_error
from torchtitan_like.checkpoint.dcp_storage import ExtentReader, load_planned
from torchtitan_like.checkpoint.errors import CheckpointError, unwrap
from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors, read_box
from torchtitan_like.checkpoint.start import format_of
from torchtitan_like.checkpoint.step_folders import (
    Manifest,
    file_records,
    read_manifest,
    suggest_step,
)
from torchtitan_like.checkpoint.unpickle import (
    CheckedEmptyPlanner,
    CheckedPlanner,
    CheckedReader,
    load_saved,
)
from torchtitan_like.checkpoint.verification import find_damage

Format = Literal["native", "hf", "dcp", "pt"]
# Naming convention of each format. Formats of one family share names; the model's tables translate
# from one family to another.
FAMILIES: dict[Format, str] = {"native": "ours", "hf": "hf", "dcp": "torch", "pt": "torch"}


@dataclass(frozen=True)
class Contents:
    """An open checkpoint. Names are as in its files.

    tensors        name -> (shape, dtype)
    object_names   names of entries that are not tensors
    read           returns one tensor or object by name
    read_all       returns all entries, nested as saved; for a native step only the weights
    files          name -> file, for safetensors only
    """

    path: Path
    format: Format
    manifest: Manifest
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], Any]
    read_all: Callable[[], Any]
    object_names: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return FAMILIES[self.format]


def open_contents(path: Path, *, trust_pickle: bool = False) -> Contents:
    """Read the headers and indices of a checkpoint.

    trust_pickle: unpickle any class that the checkpoint names. This may run code of its author.
    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    if path.is_file():
        return _open_pt(path, trust_pickle)
    stored_format = format_of(path)
    if stored_format == "hf":
        return _open_hf(path)
    if stored_format == "step":
        return _open_dcp(path, "native", trust_pickle)
    if stored_format == "dcp":
        return _open_dcp(path, "dcp", trust_pickle)
    raise CheckpointError(
        f"{path} is not a checkpoint of a supported format. Expected a step-N, a folder of "
        f"safetensors or of torch.distributed.checkpoint, or a .pt file: {suggest_step(path)}"
    )


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert any exception of torch about malformed bytes into a CheckpointError."""
    try:
        yield
    except CheckpointException as problem:  # not a subclass of Exception
        raise unwrap(problem) from problem
    except (CheckpointError, OSError):
        raise
    except Exception as problem:
        raise CheckpointError(
            f"{path} cannot be read: {type(problem).__name__}: {problem}. Expected a checkpoint of "
            "torch: copy it again"
        ) from problem


def _open_dcp(path: Path, stored_format: Format, trust: bool) -> Contents:
    manifest = read_manifest(path) or {}
    records = file_records(manifest)
    reader: Any = (
        ExtentReader(path, records, trust=trust) if manifest else CheckedReader(path, trust=trust)
    )
    with checkpoint_errors(path):
        metadata = reader.read_metadata().state_dict_metadata
    entries = {n: e for n, e in metadata.items() if isinstance(e, TensorStorageMetadata)}

    def read(name: str) -> Any:
        entry = entries.get(name)
        value = None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)
        target = {name: value}
        with checkpoint_errors(path):
            load_planned(target, reader, CheckedPlanner(path, trust=trust))
        return target[name]

    def read_all() -> Any:
        if stored_format == "native":
            return {name: read(name) for name in entries if name.startswith("model.")}
        state: dict[str, Any] = {}
        with checkpoint_errors(path):
            load_planned(state, reader, CheckedEmptyPlanner(path, trust=trust))
        return state

    tensors = {n: (tuple(e.size), e.properties.dtype) for n, e in entries.items()}
    object_names = tuple(name for name in metadata if name not in entries)
    return Contents(path, stored_format, manifest, tensors, read, read_all, object_names)


def _open_hf(path: Path) -> Contents:
    entries = open_safetensors(path, quantized=False).stored
    manifest = read_manifest(path) or {}

    def read(name: str) -> Tensor:
        entry = entries[name]
        with open(path / entry.file, "rb", buffering=0) as file:
            return read_box(file, entry, tuple((0, n, 1) for n in entry.shape))

    def read_all() -> dict[str, Tensor]:
        # The manifest of an export that this program wrote contains hashes.
        for damage in find_damage(path, file_records(manifest)):
            raise damage
        return {name: read(name) for name in entries}

    tensors = {name: (tuple(entry.shape), entry.dtype) for name, entry in entries.items()}
    files = {name: entry.file for name, entry in entries.items()}
    return Contents(path, "hf", manifest, tensors, read, read_all, files=files)


def _open_pt(path: Path, trust: bool) -> Contents:
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
    tensors = {
        name: (tuple(value.shape), value.dtype)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    object_names = tuple(name for name in values if name not in tensors)
    return Contents(path, "pt", {}, tensors, values.__getitem__, lambda: state, object_names)


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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without the module, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
