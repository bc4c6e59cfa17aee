"""Write files in extents, each with a hash.

An extent is hashed in memory immediately before it is written. Checkpoints have extents of 4 MiB
with 128-bit hashes in a manifest (`ExtentSink`). Token caches have smaller ones with 64-bit hashes
in a table, because a random sample must not hash 4 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

import xxhash

from torchtitan_like.util.files import naming

EXTENT = 4 * 2**20  # bytes, in checkpoints
WRITE_BEHIND = 2 * EXTENT


def num_extents(size: int, extent_bytes: int = EXTENT) -> int:
    """Return the number of extents in a file of `size` bytes."""
    return -(-size // extent_bytes)


class HashedStream:
    """Appends to an open file, and hashes each extent immediately before it is written.

    Every OSError contains the file's name. tail: bytes of an incomplete extent at the end of the
    file.
    """

    def __init__(
        self,
        file: IO[bytes] | FileIO,
        extent_bytes: int,
        new_hash: Callable[[bytes], Any],
        tail: bytes = b"",
    ) -> None:
        self.size = len(tail)  # bytes, from the start of an extent
        self._file = file
        self._extent_bytes = extent_bytes
        self._hash = new_hash(tail)  # of the incomplete extent
        self._digests: list[bytes] = []

    def write(self, data: Any) -> None:
        """Append any contiguous buffer, without a copy."""
        remaining = as_bytes(data)
        with naming(self._file.name):
            while remaining:
                piece = remaining[: self._extent_bytes - self.size % self._extent_bytes]
                self._hash.update(piece)
                write_all(self._file, piece)
                self.size += len(piece)
                remaining = remaining[len(piece) :]
                if self.size % self._extent_bytes == 0:
                    self._end_extent()

    def _end_extent(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()

    def tail_digest(self) -> bytes:
        """Return the hash of the bytes after the last complete extent."""
        digest: bytes = self._hash.digest()
        return digest

    def take_digests(self) -> list[bytes]:
        """Return the hashes of the extents that were completed since the last call."""
        digests, self._digests = self._digests, []
        return digests

    def finish(self) -> list[bytes]:
        """End the last extent, which may be shorter than the others. Return `take_digests()`."""
        if self.size % self._extent_bytes:
            self._end_extent()
        return self.take_digests()


@dataclass(frozen=True)
class FileRecord:
    """The size and hashes of a checkpoint's file."""

    size: int  # bytes
    extents: tuple[str, ...]  # hexadecimal xxh3-128 of each EXTENT bytes; the last may be shorter

    def span(self, index: int) -> tuple[int, int]:
        """Return the start and end (exclusive) of extent `index`, in bytes."""
        return index * EXTENT, min((index + 1) * EXTENT, self.size)


class ExtentSink(HashedStream):
    """Writes a new file of a checkpoint, sequentially and unbuffered."""

    def __init__(self, path: Path) -> None:
        self._raw = FileIO(path, "x")  # an existing file is never overwritten
        super().__init__(self._raw, EXTENT, xxhash.xxh3_128)

    def _end_extent(self) -> None:
        super()._end_extent()
        # Start write-back while the next extents are hashed. fsync then has little left to write,
        # which saves a third of the time.
        if self.size % WRITE_BEHIND == 0 and hasattr(os, "posix_fadvise"):
            start = self.size - WRITE_BEHIND
            os.posix_fadvise(self._raw.fileno(), start, WRITE_BEHIND, os.POSIX_FADV_DONTNEED)

    def close(self) -> FileRecord:
        """Wait until the bytes are on disk, and return the file's record."""
        digests = self.finish()
        with naming(self._raw.name):
            os.fsync(self._raw.fileno())
            self._raw.close()
        return FileRecord(self.size, tuple(digest.hex() for digest in digests))

    def __enter__(self) -> ExtentSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a new file of a checkpoint durably and return its record."""
    with ExtentSink(path) as sink:
        sink.write(content)
        return sink.close()


def record_of(content: bytes) -> FileRecord:
    """Return the record of a checkpoint's file with these bytes."""
    view = memoryview(content)
    starts = range(0, len(view), EXTENT)
    return FileRecord(len(view), tuple(hash_extent(view[i : i + EXTENT]) for i in starts))


def hash_extent(data: Any) -> str:
    """Return the hash of one extent of a checkpoint. data: any contiguous buffer."""
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


def as_bytes(data: Any) -> memoryview:
    """Return the bytes of any contiguous buffer."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast


def write_all(file: IO[bytes] | FileIO, data: Any) -> None:
    """Write any contiguous buffer to a file that may be unbuffered."""
    remaining = as_bytes(data)
    while remaining:  # a write is partial above 2 GiB or if the disk is nearly full
        remaining = remaining[file.write(remaining) :]
