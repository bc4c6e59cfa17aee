"""Read the pickles of a checkpoint without running what they name.

A pickle may import any function and call it, so loading one is running a program. This module is
the only one that unpickles files (docs/guides/security.md, "What is trusted"). It knows two kinds:

* `.metadata` of torch.distributed.checkpoint: a pickle of the classes in `METADATA_GLOBALS`.
* What `torch.save` writes (`.pt` files, items of a DCP file): torch reads it with `weights_only`.

torch's own `FileSystemReader` and `DefaultLoadPlanner` unpickle without a list. Use `CheckedReader`
and `CheckedPlanner` in their place.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import MANIFEST, is_inside

_CLASSES: tuple[type, ...] = (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta,
    TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, _StoragePrefix,
)  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
# Everything that a `.metadata` may name: (module, name) -> what it gets.
METADATA_GLOBALS: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
    **{
        (module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS
    },
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
}
# A pickle can set attributes of what it names. The built-in types refuse that, these do not.
_WRITABLE: tuple[Any, ...] = (*_CLASSES, *_MEM_FORMAT_ENCODING)
_LONGEST_LIST = 1_000_000  # elements; torch extends a list to whatever index a `.metadata` gives
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)")
_REASON_MARK = "WeightsUnpickler error: "


class _ForbiddenGlobalError(Exception):
    """A pickle names what is not in the list; the text is its dotted name."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look the name up in the list; nothing is imported."""
        try:
            return METADATA_GLOBALS[module_name, global_name]
        except KeyError:
            raise _ForbiddenGlobalError(f"{module_name}.{global_name}") from None


def load_metadata(content: bytes | bytearray, file: Path, *, trust: bool = False) -> Metadata:
    """Unpickle a `.metadata`; `file` is its path, for messages. trust: unpickle whatever it names.

    Raises CheckpointError if it names another class, DamagedError if it is not DCP metadata.
    """
    with _as_checkpoint_error(file):
        if trust:
            loaded = pickle.loads(content)
        else:
            with _unchanged_classes(file):
                loaded = _MetadataUnpickler(io.BytesIO(content)).load()
        _check_metadata(loaded, file)
    metadata: Metadata = loaded
    return metadata


def load_saved(
    source: Path | IO[bytes], file: Path, *, trust: bool = False, mmap: bool = False
) -> Any:
    """Load what `torch.save` wrote: tensors and plain Python values, on the CPU.

    `file` is named in messages. trust: unpickle whatever it names. Raises CheckpointError if it
    names another class, DamagedError if it cannot be read.
    """
    with _as_checkpoint_error(file):
        try:
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)
        except pickle.UnpicklingError as problem:
            if not _knows_torchao(str(problem)):
                raise
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)


def _knows_torchao(problem: str) -> bool:
    """Import torchao, which lists its tensor types, if one of them was refused. True if it is there."""
    match = _REFUSED_BY_TORCH.search(problem)
    if match is None or not match[1].startswith("torchao."):
        return False
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True


class CheckedReader(FileSystemReader):
    """torch's reader of a DCP folder, without its free unpickling. trust: with it."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        super().__init__(path)
        self.folder = path
        self.trust = trust

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for a refused class, DamagedError if it is not DCP metadata."""
        file = self.folder / ".metadata"
        metadata = load_metadata(file.read_bytes(), file, trust=self.trust)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with _as_checkpoint_error(self.folder):
            future: Future[None] = super().read_data(plan, planner)
        return future


class CheckedPlanner(DefaultLoadPlanner):
    """torch's load planner, without its free unpickling of what is no tensor. trust: with it."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = load_saved(value, self.folder, trust=self.trust)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


class CheckedEmptyPlanner(CheckedPlanner, _EmptyStateDictLoadPlanner):
    """As `CheckedPlanner`, for an empty state dict, which receives everything that is stored."""


@contextmanager
def _as_checkpoint_error(file: Path) -> Iterator[None]:
    """Turn what torch and pickle raise into CheckpointError (a refused class) or DamagedError."""
    try:
        yield
    except _ForbiddenGlobalError as problem:
        raise _refusal(file, str(problem)) from None
    except (CheckpointError, OSError):
        raise
    except pickle.UnpicklingError as problem:
        if match := _REFUSED_BY_TORCH.search(str(problem)):
            raise _refusal(file, match[1]) from None
        reason = (
            str(problem).split(_REASON_MARK)[-1].split("\n")[0]
        )  # torch adds advice to load it anyway
        raise DamagedError(f"{file} cannot be read: UnpicklingError: {reason}") from problem
    except (
        ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
        RecursionError, RuntimeError, TypeError, ValueError,
    ) as problem:  # fmt: skip
        raise DamagedError(
            f"{file} cannot be read: {type(problem).__name__}: {problem}"
        ) from problem


def _refusal(file: Path, name: str) -> CheckpointError:
    source = file.parent if file.name == ".metadata" else file
    kind = "pt" if source.is_file() else "native" if (source / MANIFEST).exists() else "dcp"
    return CheckpointError(
        f"{file} was not loaded: it asks for {name}, which could run code. Expected tensors, plain "
        "Python values and the metadata classes of torch.distributed.checkpoint. If you trust its "
        "author, make a copy without such objects: titan ckpt convert "
        f"{source} COPY --to {kind} --trust-pickle"
    )


@contextmanager
def _unchanged_classes(file: Path) -> Iterator[None]:
    """Raise CheckpointError, and put everything back, if a listed class has changed afterwards."""
    before = [dict(vars(owner)) for owner in _WRITABLE]
    try:
        yield
    finally:
        is_changed = False
        for owner, attributes in zip(_WRITABLE, before, strict=True):
            now = dict(vars(owner))
            for name in now.keys() - attributes.keys():
                delattr(owner, name)
                is_changed = True
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)
                    is_changed = True
        if is_changed:
            raise CheckpointError(f"{file} was not loaded: it changes torch's metadata classes")


def _check_metadata(metadata: Any, file: Path) -> None:
    """Raise DamagedError unless every field has its type and every path stays in the folder."""
    is_metadata = isinstance(metadata, Metadata) and type(metadata.state_dict_metadata) is dict
    if not is_metadata or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{file} cannot be read: it does not hold the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or not (
            isinstance(entry, BytesStorageMetadata) or _is_tensor_entry(entry)
        ):
            raise DamagedError(
                f"{file} cannot be read: it describes {name!r} as {type(entry).__name__}"
            )
    files: set[str] = set()
    for index, where in metadata.storage_data.items():
        is_ours = type(where) is tuple and len(where) == 3
        path, offset, length = (
            where if is_ours else (where.relative_path, where.offset, where.length)
        )
        is_typed = type(path) is str and type(offset) is int and type(length) is int
        if type(index) is not MetadataIndex or not is_typed or offset < 0 or length < 0:
            raise DamagedError(f"{file} cannot be read: it stores an item at {where!r}")
        files.add(path)
    if outside := sorted(path for path in files if not is_inside(path)):
        raise DamagedError(
            f"{file} names {outside[0]!r}: expected a file in the checkpoint's own folder"
        )
    for name, path in (
        metadata.planner_data or {}
    ).items():  # where an item is in nested dicts and lists
        if not path or not all(type(key) is str or key in range(_LONGEST_LIST) for key in path):
            raise DamagedError(f"{file} cannot be read: it puts {name!r} at {path!r}")


def _is_tensor_entry(entry: Any) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.properties.dtype, torch.dtype)
        and isinstance(entry.size, torch.Size)
        and all(isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks)
    )
