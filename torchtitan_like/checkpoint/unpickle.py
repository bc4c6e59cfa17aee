"""Read the pickles of a checkpoint without running code.

A pickle may import and call any function, so loading one can run a program. This module is the only
one that unpickles files (docs/guides/security.md, "What is trusted"). It reads two kinds:

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
# All globals that a `.metadata` may use: (module, name) -> object.
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
# A pickle can set attributes of its globals. Built-in types reject this, these classes do not.
_WRITABLE: tuple[Any, ...] = (*_CLASSES, *_MEM_FORMAT_ENCODING)
_MAX_LIST_LENGTH = 1_000_000  # torch extends a list to any index that a `.metadata` contains
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)")
_REASON_MARK = "WeightsUnpickler error: "


class _ForbiddenGlobalError(Exception):
    """A pickle uses a global that is not in the list. The message is its dotted name."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look the name up in the list. Imports nothing."""
        try:
            return METADATA_GLOBALS[module_name, global_name]
        except KeyError:
            raise _ForbiddenGlobalError(f"{module_name}.{global_name}") from None


def load_metadata(content: bytes | bytearray, file: Path, *, trust: bool = False) -> Metadata:
    """Unpickle a `.metadata`. file: its path, for messages. trust: allow any global.

    Raises CheckpointError if it uses another class, DamagedError if it is not DCP metadata.
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

    file: its path, for messages. trust: allow any global. Raises CheckpointError if it uses another
    class, DamagedError if it cannot be read.
    """
    with _as_checkpoint_error(file):
        try:
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)
        except pickle.UnpicklingError as problem:
            if not _import_torchao(str(problem)):
                raise
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)


def _import_torchao(problem: str) -> bool:
    """Import torchao if torch refused one of its types. Returns True if torchao is installed.

    The import adds torchao's types to torch's list of safe types.
    """
    match = _REFUSED_BY_TORCH.search(problem)
    if match is None or not match[1].startswith("torchao."):
        return False
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True


class CheckedReader(FileSystemReader):
    """torch's reader of a DCP folder, restricted to the listed globals. trust: allow any global."""

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
    """torch's load planner, restricted to the listed globals. trust: allow any global."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = load_saved(value, self.folder, trust=self.trust)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


class CheckedEmptyPlanner(CheckedPlanner, _EmptyStateDictLoadPlanner):
    """A `CheckedPlanner` that loads all stored entries into an empty state dict."""


@contextmanager
def _as_checkpoint_error(file: Path) -> Iterator[None]:
    """Convert errors of torch and pickle to CheckpointError (a refused class) or DamagedError."""
    try:
        yield
    except _ForbiddenGlobalError as problem:
        raise _refusal(file, str(problem)) from None
    except (CheckpointError, OSError):
        raise
    except pickle.UnpicklingError as problem:
        if match := _REFUSED_BY_TORCH.search(str(problem)):
            raise _refusal(file, match[1]) from None
        # torch appends advice to load the file without `weights_only`.
        reason = str(problem).split(_REASON_MARK)[-1].split("\n")[0]
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
    """Restore the listed classes, and raise CheckpointError if the block has changed them."""
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
    """Raise DamagedError if a field has another type or a path leaves the folder."""
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
    for index, location in metadata.storage_data.items():
        if type(location) is tuple and len(location) == 3:  # of `ExtentWriter`
            path, offset, length = location
        else:
            path, offset, length = location.relative_path, location.offset, location.length
        is_typed = type(path) is str and type(offset) is int and type(length) is int
        if type(index) is not MetadataIndex or not is_typed or offset < 0 or length < 0:
            raise DamagedError(f"{file} cannot be read: it stores an item at {location!r}")
        files.add(path)
    if outside := sorted(path for path in files if not is_inside(path)):
        raise DamagedError(
            f"{file} names {outside[0]!r}: expected a file in the checkpoint's own folder"
        )
    # The planner's data contain the path of each item in nested dicts and lists.
    for name, keys in (metadata.planner_data or {}).items():
        if not keys or not all(type(key) is str or key in range(_MAX_LIST_LENGTH) for key in keys):
            raise DamagedError(f"{file} cannot be read: it puts {name!r} at {keys!r}")


def _is_tensor_entry(entry: Any) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.properties.dtype, torch.dtype)
        and isinstance(entry.size, torch.Size)
        and all(isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks)
    )
