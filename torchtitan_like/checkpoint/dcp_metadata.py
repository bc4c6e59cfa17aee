"""Read the `.metadata` of torch.distributed.checkpoint, with torch's classes or without torch.

A `.metadata` is a pickle. A pickle may import and call any function, so loading one can run a
program (docs/guides/security.md, "What is trusted"). `load_metadata` looks every global up in a
table. `checkpoint/unpickle.py` has the table of torch's classes. `STAND_INS` has a class without
behavior for each of them, for commands that only list tensors: importing torch takes seconds.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import file_records, is_inside, read_manifest
from torchtitan_like.checkpoint.verification import ExtentSource, check_sizes
from torchtitan_like.util.run_directory import MANIFEST

METADATA = ".metadata"
CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)  # of torch.distributed.checkpoint.metadata
FILE_CLASSES = ("_StorageInfo", "_StoragePrefix")  # of torch.distributed.checkpoint.filesystem
# Name of a dtype of torch -> bytes of an element.
DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "qint32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_MAX_LIST_LENGTH = 1_000_000  # torch extends a list to any index that a `.metadata` contains
# 1 to 100 pickle instructions without a length or a memo index of 4 bytes.
_FIXED_LENGTH = re.compile(
    rb"(?:[(012NRQbadelstu)\]}o\x81\x85-\x89\x8f-\x94\x97\x98]|[Khq\x80\x82].|[M\x83].{2}|"
    rb"[Jj\x84].{4}|[G\x95].{8}|c[^\n]*\n[^\n]*\n){1,100}",
    re.DOTALL,
)
# Pickle instruction with a string, bytes or integer -> bytes of the length before it.
_LENGTH_BYTES = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)")
_REASON_MARK = "WeightsUnpickler error: "


class MetadataTypes(NamedTuple):
    """The classes and types into which a `.metadata` is read.

    globals    all globals that it may use: (module, name) -> object
    classes    name in torch -> class
    dtype      type of a tensor's dtype
    size       type of a tensor's shape
    writable   objects whose attributes a pickle could set; built-in types reject this
    """

    globals: Mapping[tuple[str, str], Any]
    classes: Mapping[str, Any]
    dtype: type
    size: type
    writable: tuple[Any, ...]


def metadata_types(
    classes: Mapping[str, type],
    dtypes: Mapping[str, Any],
    size: type,
    get_layout: Any,
    writable: tuple[Any, ...],
) -> MetadataTypes:
    """Return the types for a `.metadata`. writable: in addition to the classes."""
    package = "torch.distributed.checkpoint"
    table = {
        **{(f"{package}.metadata", name): classes[name] for name in CLASSES},
        **{(f"{package}.filesystem", name): classes[name] for name in FILE_CLASSES},
        **{("torch", name): dtype for name, dtype in dtypes.items()},
        **{(name, cls): _MakePath() for name in ("pathlib", "pathlib._local") for cls in _PATHS},
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): size,
        ("torch.serialization", "_get_layout"): get_layout,
    }
    (dtype,) = {type(value) for value in dtypes.values()}
    return MetadataTypes(table, classes, dtype, size, (*classes.values(), *writable))


class _MakePath:
    """Replaces the classes of paths. A path of two paths could double in length each time."""

    __slots__ = ()  # a pickle cannot set attributes

    def __call__(self, *parts: str) -> PurePosixPath:
        if not all(type(part) is str for part in parts):
            raise TypeError("a part of a path is not a string")
        return PurePosixPath(*parts)


class _StandIn:
    """Replaces an object of torch. It has the attributes in the pickle and no methods."""

    def __init__(self, *_arguments: object) -> None: ...


class _Properties(_StandIn):
    """Replaces TensorProperties, whose state in the pickle is a tuple."""

    dtype: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _DtypeName(str):
    """The name of a dtype."""

    __slots__ = ()


class _Size(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()

    def __new__(cls, sizes: Iterable[int] = ()) -> _Size:
        size = super().__new__(cls, sizes)
        if not all(type(n) is int for n in size):
            raise TypeError("a size is not an integer")
        return size


def _stand_ins() -> MetadataTypes:
    defaults = {"planner_data": None, "storage_data": None}
    classes: dict[str, type] = {
        name: type(name, (_StandIn,), defaults) for name in (*CLASSES, *FILE_CLASSES)
    }
    classes["TensorProperties"] = _Properties
    dtypes = {name: _DtypeName(name) for name in DTYPE_BYTES}
    return metadata_types(classes, dtypes, _Size, _StandIn, (_Size, _StandIn))


STAND_INS = _stand_ins()


class ForbiddenGlobalError(Exception):
    """A pickle uses a global that is not in the table. The message is its dotted name."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes | bytearray, types: MetadataTypes) -> None:
        super().__init__(io.BytesIO(content))
        self._globals = types.globals

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look the name up in the table. Imports nothing."""
        try:
            return self._globals[module_name, global_name]
        except KeyError:
            raise ForbiddenGlobalError(f"{module_name}.{global_name}") from None


def load_metadata(
    content: bytes | bytearray, file: Path, types: MetadataTypes, *, trust: bool = False
) -> Any:
    """Unpickle a `.metadata`. file: its path, for messages. trust: allow any global.

    Raises CheckpointError if it uses another class, DamagedError if it is not DCP metadata.
    """
    with as_checkpoint_error(file):
        if trust:
            metadata = pickle.loads(content)
        else:
            _check_memo(content)
            with _unchanged(types.writable, file):
                metadata = _Unpickler(content, types).load()
        _check_metadata(metadata, file, types)
    return metadata


def _check_memo(content: bytes | bytearray) -> None:
    """Raise UnpicklingError for a memo index above the number of bytes.

    The unpickler allocates memory for every index below it. `pickletools` is too slow for files of
    hundreds of megabytes.
    """
    position = 0
    while content[position] != pickle.STOP[0]:
        if match := _FIXED_LENGTH.match(content, position):
            position = match.end()
            continue
        instruction = content[position]
        position += 1
        if instruction == pickle.LONG_BINPUT[0]:
            index = int.from_bytes(content[position : position + 4], "little")
            if index > len(content):
                raise pickle.UnpicklingError(
                    f"it uses the memo index {index:,}, but has {len(content):,} bytes"
                )
            position += 4
        elif num_bytes := _LENGTH_BYTES.get(instruction):
            length = int.from_bytes(content[position : position + num_bytes], "little")
            position += num_bytes + length
        else:
            raise pickle.UnpicklingError(f"it has the instruction {chr(instruction)!r}")


class StoredEntries(NamedTuple):
    """The entries of a step or a DCP folder. tensors: name -> (shape, name of the dtype)."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    object_names: tuple[str, ...]


def list_entries(folder: Path) -> StoredEntries:
    """List the entries of a step or a DCP folder without importing torch.

    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    file = folder / METADATA
    manifest = read_manifest(folder)
    if manifest is not None:
        records = file_records(manifest)
        if METADATA not in records:
            raise DamagedError(
                f"{file} is not recorded in the manifest. Expected a record of every file: copy the "
                "step again"
            )
        check_sizes(folder, {METADATA: records[METADATA]})
        content = bytearray(records[METADATA].size)
        with ExtentSource(file, records[METADATA]) as source:
            source.read(0, memoryview(content))
    else:
        content = bytearray(file.read_bytes())
    metadata = load_metadata(content, file, STAND_INS)
    tensor_class = STAND_INS.classes["TensorStorageMetadata"]
    entries = metadata.state_dict_metadata
    tensors = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, tensor_class)
    }
    return StoredEntries(tensors, tuple(name for name in entries if name not in tensors))


@contextmanager
def as_checkpoint_error(file: Path) -> Iterator[None]:
    """Convert errors of torch and pickle to CheckpointError (a refused class) or DamagedError."""
    try:
        yield
    except ForbiddenGlobalError as problem:
        raise _refusal(file, str(problem)) from None
    except (CheckpointError, OSError):
        raise
    except pickle.UnpicklingError as problem:
        if name := refused_by_torch(problem):
            raise _refusal(file, name) from None
        # torch appends advice to load the file without `weights_only`.
        reason = str(problem).split(_REASON_MARK)[-1].split("\n")[0]
        raise _damage(file, f"UnpicklingError: {reason}") from problem
    except (
        ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
        RecursionError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile,
    ) as problem:  # fmt: skip
        raise _damage(file, f"{type(problem).__name__}: {problem}") from problem


def refused_by_torch(problem: pickle.UnpicklingError) -> str | None:
    """Return the dotted name of the global that torch refused to load, if that is the reason."""
    match = _REFUSED_BY_TORCH.search(str(problem))
    return match[1] if match else None


def _damage(file: Path, reason: str) -> DamagedError:
    return DamagedError(
        f"{file} cannot be read: {reason}. Expected a file of torch's checkpoints: copy it again, "
        "or use another checkpoint"
    )


def _refusal(file: Path, name: str) -> CheckpointError:
    source = file.parent if file.name == ".metadata" else file
    kind = "pt" if source.is_file() else "native" if (source / MANIFEST).exists() else "dcp"
    return CheckpointError(
        f"{file} was not loaded: it refers to {name}, which could run code. Expected tensors, plain "
        "Python values and the metadata classes of torch.distributed.checkpoint. If you trust its "
        "author, make a copy without such objects: titan ckpt export "
        f"{source} COPY --to {kind} --trust-pickle"
    )


@contextmanager
def _unchanged(writable: tuple[Any, ...], file: Path) -> Iterator[None]:
    """Restore the `writable` objects, and raise CheckpointError if the block has changed them."""
    before = [dict(vars(owner)) for owner in writable]
    try:
        yield
    finally:
        is_changed = False
        for owner, attributes in zip(writable, before, strict=True):
            now = dict(vars(owner))
            for name in now.keys() - attributes.keys():
                delattr(owner, name)
                is_changed = True
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)
                    is_changed = True
        if is_changed:
            raise CheckpointError(
                f"{file} was not loaded: it changes classes of this program. Expected only data: "
                "do not use this checkpoint"
            )


def _check_metadata(metadata: Any, file: Path, types: MetadataTypes) -> None:
    """Raise DamagedError if a field has another type or a path leaves the folder."""
    classes = types.classes
    is_metadata = (
        isinstance(metadata, classes["Metadata"]) and type(metadata.state_dict_metadata) is dict
    )
    if not is_metadata or not isinstance(metadata.storage_data, dict):
        raise _damage(file, "it does not contain the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or not (
            isinstance(entry, classes["BytesStorageMetadata"]) or _is_tensor_entry(entry, types)
        ):
            raise _damage(file, f"it describes an item as {type(entry).__name__}")
    files: set[str] = set()
    for index, location in metadata.storage_data.items():
        path, offset, length = location.relative_path, location.offset, location.length
        is_typed = type(path) is str and type(offset) is int and type(length) is int
        if type(index) is not classes["MetadataIndex"] or not is_typed or offset < 0 or length < 0:
            raise _damage(file, "it stores an item at an invalid position")
        files.add(path)
    if outside := sorted(path for path in files if not is_inside(path)):
        raise DamagedError(
            f"{file} names {outside[0]!r}. Expected a file in the checkpoint's own folder: do not "
            "use this checkpoint"
        )
    # The planner's data contain the path of each item in nested dicts and lists.
    for keys in (metadata.planner_data or {}).values():
        if not keys or not all(type(key) is str or key in range(_MAX_LIST_LENGTH) for key in keys):
            raise _damage(file, "it puts an item at an invalid index")


def _is_tensor_entry(entry: Any, types: MetadataTypes) -> bool:
    return (
        isinstance(entry, types.classes["TensorStorageMetadata"])
        and isinstance(entry.properties, types.classes["TensorProperties"])
        and isinstance(entry.properties.dtype, types.dtype)
        and isinstance(entry.size, types.size)
        and all(isinstance(chunk, types.classes["ChunkStorageMetadata"]) for chunk in entry.chunks)
    )
