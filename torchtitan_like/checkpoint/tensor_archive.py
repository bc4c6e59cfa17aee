"""The zip archive in which torch stores one tensor of a distributed checkpoint (DCP).

torch reads such a tensor with `torch.load`. Here, the elements come first in the archive, so they
start at a fixed offset, and this program reads and writes them directly:

| bytes | content |
| --- | --- |
| `HEADER_BYTES` | zip header of the record `data/0` |
| n | the elements in C order |
| the rest | the records `data.pkl`, `byteorder` and `version`, then the zip directory |

`torch.save` writes the same records. The CRC-32 of `data/0` is 0, as `torch.save` writes it after
`torch.serialization.set_crc32_options(False)`: torch does not check it, and computing it takes
several times as long as the hashes of the manifest.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from torchtitan_like.util.boxes import contiguous_strides

# Structures of the zip format (PKWARE APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16).
# All sizes and offsets are in ZIP64 fields, so that the length of a header depends only on its name.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_ZIP64 = struct.Struct("<2H2Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_ZIP64 = struct.Struct("<2H3Q")
_END_ZIP64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_ZIP64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION = 45  # of the zip format: the first with ZIP64
_DATE = 0x21  # 1980-01-01, so that equal tensors give equal bytes
_IN_ZIP64 = 0xFFFFFFFF
_IN_ZIP64_SHORT = 0xFFFF
_DATA = "data/0"


class _Record(NamedTuple):
    """A file of the archive: its name, offset and length in bytes, and CRC-32."""

    name: bytes
    offset: int
    length: int
    crc: int

    @classmethod
    def of(cls, name: str, offset: int, length: int, crc: int) -> _Record:
        return cls(b"archive/" + name.encode(), offset, length, crc)

    def header(self) -> bytes:
        """Return the local header, which precedes the content."""
        fields = _LOCAL_HEADER.pack(
            *(b"PK\3\4", _VERSION, 0, 0, 0, _DATE, self.crc, _IN_ZIP64, _IN_ZIP64),
            *(len(self.name), _LOCAL_ZIP64.size),
        )
        sizes = _LOCAL_ZIP64.pack(1, _LOCAL_ZIP64.size - 4, self.length, self.length)
        return fields + self.name + sizes

    def entry(self) -> bytes:
        """Return the entry of the zip directory."""
        fields = _ENTRY.pack(
            *(b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _DATE, self.crc, _IN_ZIP64, _IN_ZIP64),
            *(len(self.name), _ENTRY_ZIP64.size, 0, 0, 0, 0, _IN_ZIP64),
        )
        sizes = _ENTRY_ZIP64.pack(1, _ENTRY_ZIP64.size - 4, self.length, self.length, self.offset)
        return fields + self.name + sizes


def archive_header(num_bytes: int) -> bytes:
    """Return the bytes before the elements, which have `num_bytes` bytes."""
    return _Record.of(_DATA, 0, num_bytes, 0).header()


HEADER_BYTES = len(archive_header(0))


def archive_trailer(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes after the elements of a tensor."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    contents = {
        "data.pkl": _pickle_tensor(dtype, shape, num_bytes),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",  # of the archives of torch.save
    }
    directory = _Record.of(_DATA, 0, num_bytes, 0).entry()
    start = HEADER_BYTES + num_bytes
    trailer = b""
    for name, content in contents.items():
        record = _Record.of(name, start + len(trailer), len(content), zlib.crc32(content))
        trailer += record.header() + content
        directory += record.entry()
    num_records = len(contents) + 1
    offset = start + len(trailer)
    end = _END_ZIP64.pack(
        *(b"PK\6\6", _END_ZIP64.size - 12, _VERSION, _VERSION, 0, 0),
        *(num_records, num_records, len(directory), offset),
    )
    locator = _LOCATOR_ZIP64.pack(b"PK\6\7", 0, offset + len(directory), 1)
    short_end = _END.pack(
        *(b"PK\5\6", 0, 0, _IN_ZIP64_SHORT, _IN_ZIP64_SHORT, _IN_ZIP64, _IN_ZIP64, 0)
    )
    return trailer + directory + end + locator + short_end


class _Storage:
    """Represents the storage of a tensor in a pickle. `num_bytes` is its size."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Tensor:
    """Is pickled like a contiguous tensor on the CPU with one storage."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> None:
        # `_rebuild_tensor_v3` takes an untyped storage, and so one form is enough for all dtypes.
        self.arguments: tuple[Any, ...] = (
            *(_Storage(num_bytes), 0, tuple(shape), contiguous_strides(shape)),
            *(False, OrderedDict(), dtype),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v3, self.arguments


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Refer to the record `data/0` for the storage, as `torch.save` does."""
        if isinstance(value, _Storage):
            return "storage", torch.UntypedStorage, "0", "cpu", value.num_bytes
        return None


def _pickle_tensor(dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(_Tensor(dtype, shape, num_bytes))
    return buffer.getvalue()
