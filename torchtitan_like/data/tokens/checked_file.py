"""Files of numbers whose bytes are verified before they are used.

A file is divided into extents of `EXTENT_BYTES`. A separate file has its hash table: one 64-bit
xxh3 for each extent. A process verifies an extent when it first reads it, and stores that in one
bit.

Bytes are read with `preadv`, never through a memory map. A file that is truncated during a run
therefore raises an error; a memory map would end the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.util.extents import HashedStream, as_bytes, num_extents, write_all
from torchtitan_like.util.reading import open_at_once

EXTENT_BYTES = 2**15  # one random sample costs one or two extents; the table of 1 TB takes 256 MB
HASH_TYPE = np.dtype("<u8")
# A process may have 1,024 descriptors, and a source tens of thousands of files.
MAX_OPEN_FILES = 256
IN_MEMORY_BYTES = 2**23  # an index of at most this size is read once and kept
BLOCKS_IN_MEMORY = 64  # blocks of a larger index that are kept


class Hashes(Protocol):
    """The expected hashes of a file's extents."""

    def check(self, extent: int, digest: int) -> str:
        """Return "" if ``digest`` is the hash of ``extent``, else expected hash and remedy."""


def hash_extent(data: Any) -> int:
    """Return the xxh3-64 of a buffer, in [1, 2**64)."""
    return int(xxhash.xxh3_64_intdigest(data)) or 1


def table_path(path: Path) -> Path:
    """Return the file with the hash table of ``path``."""
    return path.with_name(f"{path.name}.xxh3")


class RawFile:
    """A file that is read by offset.

    is_one_of_many: open the file when it is read, and close it after `MAX_OPEN_FILES` other files
        were read. Such an object can be pickled. Otherwise the file is open as long as the object
        exists.
    """

    def __init__(self, path: Path, *, is_one_of_many: bool = False) -> None:
        self.path = path
        self.version = file_version(path)
        self.is_one_of_many = is_one_of_many
        self._stream = None if is_one_of_many else FileIO(path, opener=open_at_once)

    @property
    def size(self) -> int:
        """Size of the file in bytes when it was opened."""
        return self.version[0]

    def read(self, offset: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array ``out`` with the bytes from ``offset`` on.

        Raises DataError if the file is too short, or has changed since it was opened.
        """
        stream = self._stream or _opened(self.path, self.version)
        remaining = as_bytes(out)
        try:
            while len(remaining) and (count := os.preadv(stream.fileno(), [remaining], offset)):
                remaining = remaining[count:]
                offset += count
            status = os.fstat(stream.fileno())
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read at byte {offset:,}: {error}. Repair the disk or "
                "restore the file, then start again"
            ) from error
        if len(remaining):
            raise DataError(
                f"{self.path} ends at byte {offset:,}: it was truncated during the run. Expected "
                f"{self.size:,} bytes: restore the file and start again"
            )
        if (status.st_size, status.st_mtime_ns) != self.version:
            is_same_size = status.st_size == self.size
            size = f"{status.st_size:,} bytes, expected {self.size:,}"
            change = "the same size, another modification time" if is_same_size else size
            raise DataError(
                f"{self.path} has changed since the run opened it ({change}). Expected no change: "
                "if its content is the same, start again; otherwise restore the file first"
            )


class HashTable:
    """The hash table of a file that this program has written. remedy: the remedy for damage.

    Raises DataError if the size of the table does not match ``file``.
    """

    def __init__(self, file: RawFile, remedy: str) -> None:
        # The table remains open if the file does.
        self._table = RawFile(table_path(file.path), is_one_of_many=file.is_one_of_many)
        self._remedy = remedy
        expected = num_extents(file.size, EXTENT_BYTES) * HASH_TYPE.itemsize
        if self._table.size != expected:
            raise DataError(
                f"{self._table.path} is damaged: it has {self._table.size:,} bytes. Expected "
                f"{expected:,}: {remedy}"
            )

    def check(self, extent: int, digest: int) -> str:
        """See `Hashes.check`."""
        entry = np.empty(1, HASH_TYPE)
        self._table.read(extent * HASH_TYPE.itemsize, entry)
        expected = int(entry[0])
        return "" if digest == expected else f"Expected {expected:016x}: {self._remedy}"


class CheckedFile:
    """A file whose extents are verified when this process first reads them.

    hashes: None: no verification. `read` raises DataError for an extent with another hash, and in
    the cases of `RawFile.read`.
    """

    def __init__(self, file: RawFile, hashes: Hashes | None = None) -> None:
        self.file = file
        self.hashes = hashes
        self._verified = bytearray(-(-num_extents(file.size, EXTENT_BYTES) // 8))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_verified": bytes(len(self._verified))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _verified=bytearray(state["_verified"]))

    def read(self, offset: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array ``out`` with the bytes from ``offset`` on."""
        if self.hashes is not None:
            first, last = offset // EXTENT_BYTES, (offset + out.nbytes - 1) // EXTENT_BYTES
            for extent in range(first, last + 1):
                if not self._verified[extent >> 3] >> (extent & 7) & 1:
                    self.verify(extent)
        self.file.read(offset, out)

    def verify(self, extent: int) -> None:
        """Read one extent and check its hash. Raises DataError if it differs."""
        assert self.hashes is not None
        start = extent * EXTENT_BYTES
        data = np.empty(min(EXTENT_BYTES, self.file.size - start), np.uint8)
        self.file.read(start, data)
        digest = hash_extent(data)
        if problem := self.hashes.check(extent, digest):
            raise DataError(
                f"{self.file.path} is damaged: bytes {start:,} to {start + len(data) - 1:,} have "
                f"the hash {digest:016x}. {problem}"
            )
        self._verified[extent >> 3] |= 1 << (extent & 7)


class CheckedArray:
    """Numbers of a `CheckedFile` as a one-dimensional array.

    Supports len(), slices of step 1 and arrays of indices, which return copies. Can be pickled.

    in_memory: keep the numbers after the first read if they have at most `IN_MEMORY_BYTES`, for an
        index that is searched at every step.

    Not thread-safe: only one thread at a time may read an array. In a run, the main thread reads
    the samples. A thread that makes windows ahead, or checks one of many files, has separate
    arrays.
    """

    def __init__(
        self,
        file: CheckedFile,
        dtype: np.dtype[Any],
        offset: int = 0,
        count: int | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        self.file = file
        self.dtype = dtype
        self._offset = offset
        self._count = (file.file.size - offset) // dtype.itemsize if count is None else count
        self._per_block = EXTENT_BYTES // dtype.itemsize
        self._in_memory = in_memory and self.nbytes <= IN_MEMORY_BYTES
        self._values: NDArray[Any] | None = None
        self._blocks: dict[int, NDArray[Any]] = {}
        self._first_of_block: NDArray[Any] | None = None
        self._has_first: NDArray[np.bool_] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None, "_blocks": {}, "_first_of_block": None}

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return self._count * self.dtype.itemsize

    def view(self, dtype: str) -> CheckedArray:
        """Return the same bytes as another dtype of the same size."""
        other = copy(self)
        other.dtype = np.dtype(dtype)
        return other

    def with_file(self, file: CheckedFile) -> CheckedArray:
        """Return the same numbers, read through another `CheckedFile` of the same file."""
        other = copy(self)
        other.file = file
        return other

    def fill(self, out: NDArray[Any], first: int) -> None:
        """Fill the contiguous array ``out``, of the same dtype, from index ``first`` on."""
        if len(out):
            self.file.read(self._offset + first * self.dtype.itemsize, out)

    def rows(self, first: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Return [first, first + length) for each of ``first`` (rows,), as (rows, length)."""
        rows = np.empty((len(first), length), self.dtype)
        for row, index in zip(rows, first.tolist(), strict=True):
            self.fill(row, index)
        return rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self._count)
            assert step == 1, step
            if self._in_memory:
                return self._all()[start:stop]
            values = np.empty(max(stop - start, 0), self.dtype)
            self.fill(values, start)
            return values
        if self._in_memory:
            return self._all()[key]
        if isinstance(key, np.ndarray):
            return self._gather(key.ravel()).reshape(key.shape)
        index = int(key) + (self._count if key < 0 else 0)
        return self[index : index + 1][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def tolist(self) -> list[Any]:
        """Return all numbers."""
        values: list[Any] = self[:].tolist()
        return values

    def searchsorted(self, values: NDArray[Any], side: Any = "left") -> NDArray[np.int64]:
        """Return the insertion points of ``values`` in sorted numbers, as `numpy.searchsorted`."""
        if self._in_memory:
            return self._all().searchsorted(values, side)
        flat = values.ravel()
        blocks = self._block_of(flat, side)
        indices = np.empty(flat.shape, np.int64)
        for block, rows in _groups(blocks):
            block_indices = self._block(block).searchsorted(flat[rows], side)
            indices[rows] = block_indices + block * self._per_block
        return indices.reshape(values.shape)

    def _all(self) -> NDArray[Any]:
        if self._values is None:
            values = np.empty(self._count, self.dtype)
            self.fill(values, 0)
            values.flags.writeable = False
            self._values = values
        return self._values

    def _gather(self, indices: NDArray[Any]) -> NDArray[Any]:
        values = np.empty(indices.shape, self.dtype)
        for block, rows in _groups(indices // self._per_block):
            values[rows] = self._block(block)[indices[rows] - block * self._per_block]
        return values

    def _block(self, block: int) -> NDArray[Any]:
        """Return the numbers of one block. The last few blocks remain in memory."""
        values = self._blocks.get(block)
        if values is None:
            start = block * self._per_block
            values = np.empty(min(self._per_block, self._count - start), self.dtype)
            self.fill(values, start)
            while len(self._blocks) >= BLOCKS_IN_MEMORY:
                self._blocks.pop(next(iter(self._blocks)), None)
            self._blocks[block] = values
        return values

    def _block_of(self, values: NDArray[Any], side: str) -> NDArray[np.int64]:
        """Return, for each value, the last block whose first number is smaller, else block 0.

        For side "right", it is smaller or equal. This is one binary search for all values. The
        first number of a block is read when it is first compared.
        """
        num_blocks = -(-self._count // self._per_block)
        if self._first_of_block is None or self._has_first is None:
            self._first_of_block = np.zeros(num_blocks, self.dtype)
            self._has_first = np.zeros(num_blocks, np.bool_)
        low, high = np.zeros(len(values), np.int64), np.full(len(values), num_blocks)
        while (high - low > 1).any():
            middle = np.minimum((low + high) // 2, num_blocks - 1)
            for block in np.unique(middle[~self._has_first[middle]]).tolist():
                self.fill(self._first_of_block[block : block + 1], block * self._per_block)
                self._has_first[block] = True
            firsts = self._first_of_block[middle]
            is_after = (firsts < values if side == "left" else firsts <= values) & (high - low > 1)
            high = np.where(is_after | (high - low <= 1), high, middle)
            low = np.where(is_after, middle, low)
        return low


def _groups(keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each distinct key with its indices."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    boundaries = np.flatnonzero(np.diff(ordered)) + 1
    for indices in np.split(order, boundaries) if len(order) else []:
        yield int(keys[indices[0]]), indices


class HashedWriter:
    """Appends to a file and writes its hash table. Bytes are hashed in memory, before the write.

    size: bytes that an earlier process has committed. The rest of the file is truncated. After
        `close` without `finish`, another process can continue the file.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file = _open_at(path, size)
        num_whole = size // EXTENT_BYTES
        self._table = _open_at(table_path(path), num_whole * HASH_TYPE.itemsize)
        tail_start = num_whole * EXTENT_BYTES
        tail = os.pread(self._file.fileno(), size - tail_start, tail_start)
        self._stream = hashed_stream(self._file, tail)

    def write(self, data: Any) -> None:
        """Append any contiguous buffer."""
        self._stream.write(data)
        write_all(self._table, as_table(self._stream.take_digests()))

    def tail_digest(self) -> int:
        """Return the hash of the bytes after the last whole extent."""
        return int.from_bytes(self._stream.tail_digest(), "big") or 1

    def sync(self) -> None:
        """Wait until all written bytes are on disk."""
        os.fsync(self._file.fileno())
        os.fsync(self._table.fileno())

    def finish(self) -> None:
        """Complete the table and close both files."""
        write_all(self._table, as_table(self._stream.finish()))
        self.sync()
        self.close()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._table.close()


def hashed_stream(file: IO[bytes] | FileIO, tail: bytes = b"") -> HashedStream:
    """Return a stream that appends to ``file`` and hashes its extents. tail: see `HashedStream`."""
    return HashedStream(file, EXTENT_BYTES, xxhash.xxh3_64, tail)


def as_table(digests: list[bytes]) -> bytes:
    """Return the hashes of a `hashed_stream` as bytes of a hash table."""
    hashes = np.frombuffer(b"".join(digests), ">u8")
    table: bytes = np.maximum(hashes, 1).astype(HASH_TYPE).tobytes()
    return table


def _open_at(path: Path, size: int) -> FileIO:
    """Open ``path`` for writing after its first ``size`` bytes.

    It is not opened in append mode: another node that writes the same file must write the same
    bytes at the same offsets.
    """
    path.touch()
    stream = path.open("r+b", buffering=0)
    stream.truncate(size)
    stream.seek(size)
    return stream


def file_version(path: Path) -> tuple[int, int]:
    """Return size and modification time (ns) of a file, which change when it is written."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


@lru_cache(MAX_OPEN_FILES)
def _opened(path: Path, version: tuple[int, int]) -> FileIO:
    try:
        return FileIO(path, opener=open_at_once)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened again ({error}). Expected the file to exist during the run: "
            "restore it"
        ) from error
