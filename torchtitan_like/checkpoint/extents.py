"""Write and read files in extents of 4 MiB, each with a hash.

An extent is hashed in memory immediately before it is written, and verified when it is read.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_like.checkpoint.errors import DamagedError

EXTENT = 4 * 2**20
PIECE = 2**18  # bytes read and hashed at a time; fits in a core's cache
WRITE_BEHIND = 2 * EXTENT
NUM_STAT_THREADS = 16  # for the sizes of thousands of files on a file server
REMEDY = "copy it again, or use another checkpoint"
Progress = Callable[[int, int], None]  # (bytes done, total bytes)


@dataclass(frozen=True)
class FileRecord:
    """The size and hashes of a file."""

    size: int  # bytes
    extents: tuple[str, ...]  # hexadecimal xxh3-128 of each EXTENT bytes; the last may be shorter

    def span(self, index: int) -> tuple[int, int]:
        """Return the start and end (exclusive) of extent `index`, in bytes."""
        return index * EXTENT, min((index + 1) * EXTENT, self.size)


def hash_extent(data: Any) -> str:
    """Return the hash of one extent. data: any contiguous buffer."""
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


class ExtentSink:
    """Writes a new file sequentially and unbuffered, and hashes each extent before it is written.

    `close` returns the record of the file. Every OSError contains the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_128()
        self._file = io.FileIO(path, "x")  # an existing file is never overwritten

    def write(self, data: Any) -> None:
        """Append a one-dimensional buffer of bytes, without a copy."""
        remaining = memoryview(data)
        with naming(self.path):
            while remaining:
                piece = remaining[: EXTENT - self.size % EXTENT]
                self._hash.update(piece)
                unwritten = piece
                while unwritten:  # a write is partial above 2 GiB or if the disk is nearly full
                    unwritten = unwritten[self._file.write(unwritten) :]
                self.size += len(piece)
                remaining = remaining[len(piece) :]
                if self.size % EXTENT == 0:
                    self._end_extent()

    def close(self) -> FileRecord:
        """Wait until the bytes are on disk, and return the file's record."""
        if self.size % EXTENT:
            self._end_extent()
        with naming(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        return FileRecord(self.size, tuple(self._digests))

    def _end_extent(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        # Start write-back while the next extents are hashed. fsync then has little left to write,
        # which saves a third of the time.
        if self.size % WRITE_BEHIND == 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(
                self._file.fileno(), self.size - WRITE_BEHIND, WRITE_BEHIND, os.POSIX_FADV_DONTNEED
            )

    def __enter__(self) -> ExtentSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def record_of(content: bytes) -> FileRecord:
    """Return the record of a file with these bytes."""
    view = memoryview(content)
    starts = range(0, len(view), EXTENT)
    return FileRecord(len(view), tuple(hash_extent(view[i : i + EXTENT]) for i in starts))


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a new file durably and return its record."""
    with ExtentSink(path) as sink:
        sink.write(content)
        return sink.close()


class ExtentSource:
    """Reads a recorded file in whole extents, and verifies each before it returns its bytes.

    Raises DamagedError if the hash of an extent differs. `verified` contains the indices of all
    verified extents.
    """

    def __init__(self, path: Path, record: FileRecord, buffer: memoryview | None = None) -> None:
        """buffer: EXTENT writable bytes for reads that are not in place. By default, allocated."""
        self.path = path
        self.record = record
        self.verified: set[int] = set()
        self._buffer = buffer
        self._buffered_extent: int | None = None  # index
        self._file = io.FileIO(path)

    def extent(self, index: int) -> memoryview:
        """Return the bytes of an extent, in a buffer that the next call reuses."""
        start, end = self.record.span(index)
        if self._buffer is None:
            self._buffer = memoryview(bytearray(EXTENT))
        view = self._buffer[: end - start]
        if self._buffered_extent != index:
            self._buffered_extent = None
            self.read_extent(index, [view])
            self._buffered_extent = index
        return view

    def read_extent(self, index: int, views: Sequence[memoryview]) -> None:
        """Read an extent into writable buffers, which together have exactly its length."""
        start, end = self.record.span(index)
        assert sum(map(len, views)) == end - start, (views, start, end)
        self._file.seek(start)
        digest = xxhash.xxh3_128()
        with reading(self.path):
            for view in views:
                while len(view) and (count := self._file.readinto(view[:PIECE])):
                    digest.update(view[:count])
                    view = view[count:]
        if digest.hexdigest() != self.record.extents[index]:
            raise DamagedError(
                f"{self.path} is damaged: extent {index} (bytes {start} to {end}) has another hash "
                f"than in the manifest. Expected {self.record.extents[index]}: {REMEDY}"
            )
        self.verified.add(index)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill the writable buffer `target` with the file's bytes from `offset`.

        Whole extents are read in place; parts of extents are copied.
        """
        while target:
            index = offset // EXTENT
            start, end = self.record.span(index)
            length = min(end - offset, len(target))
            if length == end - start:
                self.read_extent(index, [target[:length]])
            else:
                target[:length] = self.extent(index)[offset - start : offset - start + length]
            offset += length
            target = target[length:]

    def __enter__(self) -> ExtentSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_sizes(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Raise DamagedError for the first file that is missing or has another size."""

    def check(name: str) -> None:
        path, record = folder / name, records[name]
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DamagedError(
                f"{path} is missing. Expected {record.size} bytes: {REMEDY}"
            ) from None
        if size != record.size:
            raise DamagedError(f"{path} has {size} bytes. Expected {record.size}: {REMEDY}")

    with ThreadPoolExecutor(NUM_STAT_THREADS) as pool:
        list(pool.map(check, records))


def find_damage(
    folder: Path,
    records: Mapping[str, FileRecord],
    extents: Iterable[tuple[str, int]] | None = None,
    progress: Progress | None = None,
) -> Iterator[DamagedError]:
    """Read and verify `extents`, pairs of file name and index. By default, all, and all file sizes.

    Yields one DamagedError for each file of a wrong size and for each damaged extent.
    """
    readable = dict(records)
    if extents is None:
        for name, record in records.items():
            try:
                check_sizes(folder, {name: record})
            except DamagedError as error:
                del readable[name]
                yield error
        extents = all_extents(readable)
    by_file: dict[str, list[int]] = {}
    for name, index in extents:
        by_file.setdefault(name, []).append(index)
    spans = [records[name].span(index) for name in by_file for index in by_file[name]]
    total_bytes = sum(end - start for start, end in spans)
    num_bytes = 0
    buffer = memoryview(bytearray(EXTENT))
    for name, indices in by_file.items():
        with ExtentSource(folder / name, records[name], buffer) as source:
            for index in indices:
                start, end = records[name].span(index)
                try:
                    source.read_extent(index, [buffer[: end - start]])
                except DamagedError as error:
                    yield error
                num_bytes += end - start
                if progress is not None:
                    progress(num_bytes, total_bytes)


def all_extents(records: Mapping[str, FileRecord]) -> Iterator[tuple[str, int]]:
    """Return (file name, index) of every extent, in the order of `records`."""
    return (
        (name, index) for name, record in records.items() for index in range(len(record.extents))
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of a read or write, which has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError, and raise DamagedError for an unreadable sector."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedError(
                f"{path} is damaged: {error}. Expected a readable file: {REMEDY}"
            ) from error
        raise
