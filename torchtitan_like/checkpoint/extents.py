"""Files in extents of 4 MiB, each with a hash taken in memory just before it was written: write, record, verify, read."""

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
PIECE = 2**18  # bytes read and hashed at a time: what a core's own cache holds
WRITE_BEHIND = 2 * EXTENT
NUM_ASKING = (
    16  # threads that ask a file server for sizes: thousands of ranks write thousands of files
)
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class FileRecord:
    """What a file is known to hold."""

    size: int  # bytes
    extents: tuple[str, ...]  # hexadecimal xxh3-128 of each EXTENT bytes; the last may be shorter

    def span(self, index: int) -> tuple[int, int]:
        """First and one-past-last byte of extent `index`."""
        return index * EXTENT, min((index + 1) * EXTENT, self.size)


def hash_extent(data: Any) -> str:
    """The hash of one extent's bytes (any contiguous buffer)."""
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


class ExtentSink:
    """A new file, written from front to back, unbuffered; each extent is hashed before its bytes leave memory.

    Leaving the `with` block without `close` leaves a file without a record. Every OSError carries the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_128()
        self._file = io.FileIO(path, "x")  # an existing file is never overwritten

    def write(self, data: Any) -> None:
        """Append a one-dimensional buffer of bytes, which is not copied."""
        rest = memoryview(data)
        with naming(self.path):
            while rest:
                piece = rest[: EXTENT - self.size % EXTENT]
                self._hash.update(piece)
                unwritten = piece
                while unwritten:  # a write to a nearly full disk, or one beyond 2 GiB, is partial
                    unwritten = unwritten[self._file.write(unwritten) :]
                self.size += len(piece)
                rest = rest[len(piece) :]
                if self.size % EXTENT == 0:
                    self._end_extent()

    def close(self) -> FileRecord:
        """Wait until the bytes are on disk; what was written."""
        if self.size % EXTENT:
            self._end_extent()
        with naming(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        return FileRecord(self.size, tuple(self._digests))

    def _end_extent(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        # The disk works while the next extents are hashed, so that little is left for fsync: a third of a save's time.
        if self.size % WRITE_BEHIND == 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(
                self._file.fileno(), self.size - WRITE_BEHIND, WRITE_BEHIND, os.POSIX_FADV_DONTNEED
            )

    def __enter__(self) -> ExtentSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def record_of(content: bytes) -> FileRecord:
    """What a file of these bytes is known to hold."""
    view = memoryview(content)
    starts = range(0, len(view), EXTENT)
    return FileRecord(len(view), tuple(hash_extent(view[i : i + EXTENT]) for i in starts))


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a whole new file durably; what was written."""
    with ExtentSink(path) as sink:
        sink.write(content)
        return sink.close()


class ExtentSource:
    """A recorded file, read by whole extents. Every extent read is verified before its bytes are handed out.

    Raises DamagedError when an extent does not hold what was written. `verified` remembers those that do.
    """

    def __init__(self, path: Path, record: FileRecord, buffer: memoryview | None = None) -> None:
        """`buffer`: EXTENT writable bytes for what is not read in place (default: made when first needed)."""
        self.path = path
        self.record = record
        self.verified: set[int] = set()
        self._buffer = buffer
        self._held: int | None = None  # the extent that the buffer holds
        self._file = io.FileIO(path)

    def extent(self, index: int) -> memoryview:
        """The bytes of an extent, in a buffer that the next call reuses."""
        begin, end = self.record.span(index)
        if self._buffer is None:
            self._buffer = memoryview(bytearray(EXTENT))
        view = self._buffer[: end - begin]
        if self._held != index:
            self._held = None
            self.read_extent(index, [view])
            self._held = index
        return view

    def read_extent(self, index: int, into: Sequence[memoryview]) -> None:
        """Read an extent straight into writable bytes, which together have exactly its length."""
        begin, end = self.record.span(index)
        assert sum(map(len, into)) == end - begin, (into, begin, end)
        self._file.seek(begin)
        digest = xxhash.xxh3_128()
        with reading(self.path):
            for view in into:
                while len(view) and (count := self._file.readinto(view[:PIECE])):
                    digest.update(view[:count])
                    view = view[count:]
        if digest.hexdigest() != self.record.extents[index]:
            raise DamagedError(
                f"{self.path} is damaged: extent {index} (bytes {begin} to {end}) is not what was written"
            )
        self.verified.add(index)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, writable bytes, with those of the file from `offset` on: whole extents in place, parts by copy."""
        while into:
            index = offset // EXTENT
            begin, end = self.record.span(index)
            length = min(end - offset, len(into))
            if length == end - begin:
                self.read_extent(index, [into[:length]])
            else:
                into[:length] = self.extent(index)[offset - begin : offset - begin + length]
            offset, into = offset + length, into[length:]

    def __enter__(self) -> ExtentSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_sizes(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Every file is there and as long as recorded; reads no contents. Raises DamagedError for the first that is not."""

    def check(name: str) -> None:
        path, record = folder / name, records[name]
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing, of {record.size} bytes") from None
        if size != record.size:
            raise DamagedError(f"{path} holds {size} bytes, of {record.size} that were written")

    with ThreadPoolExecutor(NUM_ASKING) as pool:
        list(pool.map(check, records))


def find_damage(
    folder: Path,
    records: Mapping[str, FileRecord],
    wanted: Iterable[tuple[str, int]] | None = None,
    progress: Progress | None = None,
) -> Iterator[DamagedError]:
    """Read and check the `wanted` extents (file name, index; default: all, and every file's length).

    Yields one DamagedError for each file of a wrong length and each damaged extent.
    """
    good = dict(records)
    if wanted is None:
        for name, record in records.items():
            try:
                check_sizes(folder, {name: record})
            except DamagedError as error:
                del good[name]
                yield error
        wanted = all_extents(good)
    by_file: dict[str, list[int]] = {}
    for name, index in wanted:
        by_file.setdefault(name, []).append(index)
    total = sum(
        end - begin for name in by_file for begin, end in map(records[name].span, by_file[name])
    )
    done, buffer = 0, memoryview(bytearray(EXTENT))
    for name, indices in by_file.items():
        with ExtentSource(folder / name, records[name], buffer) as source:
            for index in indices:
                begin, end = records[name].span(index)
                try:
                    source.read_extent(index, [buffer[: end - begin]])
                except DamagedError as error:
                    yield error
                done += end - begin
                if progress is not None:
                    progress(done, total)


def all_extents(records: Mapping[str, FileRecord]) -> Iterator[tuple[str, int]]:
    """(file name, index) of every extent, in the order of `records`."""
    return (
        (name, index) for name, record in records.items() for index in range(len(record.extents))
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name into an OSError of a read or write, which has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `naming`; and a sector that cannot be read is damage."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedError(f"{path} is damaged: {error}") from error
        raise
