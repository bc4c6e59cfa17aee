"""Read the `.metadata` of torch.distributed.checkpoint (DCP) without torch and without running code.

A `.metadata` is a pickle. A pickle may import and call any function, so loading one can run a
program (docs/guides/security.md, "What is trusted"). `load_metadata` looks every global up in a
table, which has a class without behavior for each class of torch. Importing torch takes seconds,
and commands that only list tensors do not need it. torch's own `weights_only` unpickler, which
`unpickle.py` uses for tensors, cannot read a `.metadata`: it refuses pickles of protocol 4.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import is_inside
from torchtitan_like.checkpoint.verification import ExtentSource, check_sizes
from torchtitan_like.util.extents import FileRecord
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


class Chunk(NamedTuple):
    """A block of a stored tensor, and the bytes of a file that store it.

    start, length: in bytes; the length counts an archive's records next to the elements too.
    transforms: torch's extensions that the bytes have passed through, such as a compression.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()


class TensorEntry(NamedTuple):
    """A tensor of a `.metadata`. dtype: its name in torch."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


class DcpMetadata(NamedTuple):
    """The content of a `.metadata`.

    objects: name -> its bytes, as a chunk without dimensions.
    paths: name -> the keys of the entry in nested dicts and lists.
    """

    tensors: dict[str, TensorEntry]
    objects: dict[str, Chunk]
    paths: dict[str, tuple[str | int, ...]]


class _MakePath:
    """Replaces the classes of paths. A path of two paths could double in length each time."""

    __slots__ = ()  # a pickle cannot set attributes

    def __call__(self, *parts: str) -> PurePosixPath:
        if not all(type(part) is str for part in parts):
            raise TypeError("a part of a path is not a string")
        return PurePosixPath(*parts)


class _Sealed(type):
    """A class whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"cannot set {cls.__name__}.{name}")


class _StandIn(metaclass=_Sealed):
    """Replaces an object of torch. It has the attributes in the pickle and no methods."""

    # torch leaves these out of a pickle if they are None.
    offset: Any = None
    planner_data: Any = None
    storage_data: Any = None
    transform_descriptors: Any = None

    def __init__(self, *_arguments: object) -> None: ...


class _Properties(_StandIn):
    """Replaces TensorProperties, whose state in the pickle is a tuple."""

    dtype: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _DtypeName(str):
    """The name of a dtype."""

    __slots__ = ()


def _stand_ins() -> dict[str, Any]:
    """Return the class that replaces each class of torch."""
    names = (*CLASSES, *FILE_CLASSES)
    return {name: _Sealed(name, (_StandIn,), {}) for name in names} | {
        "TensorProperties": _Properties
    }


_STAND_INS = _stand_ins()
_PACKAGE = "torch.distributed.checkpoint"
# All globals that a `.metadata` may use: (module, name) -> object.
GLOBALS: dict[tuple[str, str], Any] = {
    **{(f"{_PACKAGE}.metadata", name): _STAND_INS[name] for name in CLASSES},
    **{(f"{_PACKAGE}.filesystem", name): _STAND_INS[name] for name in FILE_CLASSES},
    **{("torch", name): _DtypeName(name) for name in DTYPE_BYTES},
    **{(name, cls): _MakePath() for name in ("pathlib", "pathlib._local") for cls in _PATHS},
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _StandIn,
    # Early releases of Python 3.11 pickle an enum as getattr(class, name). It is not called here.
    ("builtins", "getattr"): _StandIn,
    ("__builtin__", "getattr"): _StandIn,  # in a pickle of protocol 2
}


class ForbiddenGlobalError(Exception):
    """A pickle uses a global that is not in the table. The message is its dotted name."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes | bytearray, trust: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._trust = trust

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look the name up in the table. Imports nothing, unless the file is trusted."""
        if (module_name, global_name) in GLOBALS:
            return GLOBALS[module_name, global_name]
        if self._trust:
            return super().find_class(module_name, global_name)
        raise ForbiddenGlobalError(f"{module_name}.{global_name}")


def load_metadata(content: bytes | bytearray, file: Path, *, trust: bool = False) -> DcpMetadata:
    """Unpickle a `.metadata`. file: its path, for messages. trust: allow any global.

    Raises CheckpointError if it uses another class, DamagedError if it is not DCP metadata.
    """
    with as_checkpoint_error(file), _without_collection():
        if not trust:
            _check_memo(content)
        return _convert(_Unpickler(content, trust).load(), file)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend the garbage collector, which otherwise takes half of the time of a large file."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def read_metadata(
    folder: Path, records: Mapping[str, FileRecord] | None = None, *, trust: bool = False
) -> DcpMetadata:
    """Read the `.metadata` of a step or a DCP folder.

    records: the files of a native step, to verify the bytes. trust: allow any global.
    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    file = folder / METADATA
    if records is None:
        return load_metadata(file.read_bytes(), file, trust=trust)
    if METADATA not in records:
        raise DamagedError(f"{file} is not recorded in the manifest")
    check_sizes(folder, {METADATA: records[METADATA]})
    content = bytearray(records[METADATA].size)
    with ExtentSource(file, records[METADATA]) as source:
        source.read(0, memoryview(content))
    return load_metadata(content, file, trust=trust)


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


def _convert(metadata: Any, file: Path) -> DcpMetadata:
    """Return what an unpickled `.metadata` contains.

    Raises DamagedError if a field has another type or a path leaves the folder.
    """
    if type(metadata) is not _STAND_INS["Metadata"] or not (
        type(metadata.state_dict_metadata) is dict and isinstance(metadata.storage_data, dict)
    ):
        raise _damage(file, "it does not contain the metadata of a checkpoint")
    locations = _locations(metadata.storage_data, file)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Chunk] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is str and type(entry) is _STAND_INS["BytesStorageMetadata"]:
            objects[name] = Chunk((), (), *locations[name, None])
        elif type(name) is str and _is_tensor_entry(entry):
            chunks = tuple(
                Chunk(chunk.offsets, chunk.sizes, *locations[name, chunk.offsets])
                for chunk in entry.chunks
            )
            tensors[name] = TensorEntry(entry.size, str(entry.properties.dtype), chunks)
        else:
            raise _damage(file, f"it describes an item as {type(entry).__name__}")
    paths = metadata.planner_data or {}
    for keys in paths.values():
        if not keys or not all(type(key) is str or key in range(_MAX_LIST_LENGTH) for key in keys):
            raise _damage(file, "it puts an item at an invalid index")
    return DcpMetadata(tensors, objects, paths)


def _locations(
    storage_data: Mapping[Any, Any], file: Path
) -> dict[tuple[str, Any], tuple[Any, ...]]:
    """Return file, start, length and transforms of each item by its name and offsets."""
    locations = {}
    for index, location in storage_data.items():
        path, start, length = location.relative_path, location.offset, location.length
        is_typed = type(path) is str and type(start) is int and type(length) is int
        if type(index) is not _STAND_INS["MetadataIndex"] or not is_typed or min(start, length) < 0:
            raise _damage(file, "it stores an item at an invalid position")
        transforms = tuple(location.transform_descriptors or ())
        locations[index.fqn, index.offset] = path, start, length, transforms
    files = {path for path, *_ in locations.values()}
    if outside := sorted(path for path in files if not is_inside(path)):
        raise DamagedError(
            f"{file} names {outside[0]!r}. Expected a file in the checkpoint's own folder: do not "
            "use this checkpoint"
        )
    return locations


def _is_tensor_entry(entry: Any) -> bool:
    chunk_class = _STAND_INS["ChunkStorageMetadata"]
    return (
        type(entry) is _STAND_INS["TensorStorageMetadata"]
        and type(entry.properties) is _Properties
        and type(entry.properties.dtype) is _DtypeName
        and _is_size(entry.size)
        and all(
            type(chunk) is chunk_class
            and _is_size(chunk.offsets)
            and _is_size(chunk.sizes)
            and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            for chunk in entry.chunks
        )
    )


def _is_size(value: Any) -> bool:
    return type(value) is tuple and {*map(type, value)} <= {int} and min(value, default=0) >= 0
