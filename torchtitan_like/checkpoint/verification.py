"""Verify the files of a checkpoint against the records of its manifest.

Every extent is verified when it is read, before its bytes are used.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.util.extents import EXTENT, FileRecord
from torchtitan_like.util.files import naming

if TYPE_CHECKING:  # imports torch, which commands that only list steps do not need
    from torchtitan_like.distributed.world import HostGroup

PIECE = 2**18  # bytes read and hashed at a time; fits in a core's cache
NUM_STAT_THREADS = 16  # for the sizes of thousands of files on a file server
REMEDY = "copy it again, or use another checkpoint"
Progress = Callable[[int, int], None]  # (bytes done, total bytes)


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


def verify_rest(
    folder: Path,
    records: Mapping[str, FileRecord],
    verified: Mapping[str, set[int]],
    group: HostGroup,
) -> None:
    """Verify the extents that no rank has read, split over the ranks. A collective.

    verified: the extents that this rank has verified.
    Raises DamagedError on the rank that finds damage.
    """
    verified_extents = {
        (name, index)
        for rank_verified in group.gather_objects(verified)
        for name in rank_verified
        for index in rank_verified[name]
    }
    remaining = [extent for extent in all_extents(records) if extent not in verified_extents]
    start = len(remaining) * group.rank // group.size
    end = len(remaining) * (group.rank + 1) // group.size
    for error in find_damage(folder, records, remaining[start:end]):
        raise error


def verify_together(folder: Path, records: Mapping[str, FileRecord], group: HostGroup) -> None:
    """Read every file and verify its size and hashes. The ranks share the work.

    Raises DamagedError on every rank if a file is missing or differs from its record.
    """
    group.run_on_leader(lambda: check_sizes(folder, records))
    group.run_on_all(lambda: verify_rest(folder, records, {}, group))


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
