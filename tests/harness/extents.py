"""Hash and verify files that were written in extents."""

from __future__ import annotations

import io
from pathlib import Path

from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.util.extents import EXTENT, FileRecord, hash_extent


def record_file(path: Path) -> FileRecord:
    """Hash a file that was not written through an ExtentSink. Raises OSError."""
    digests, size, buffer = [], 0, memoryview(bytearray(EXTENT))
    with io.BufferedReader(io.FileIO(path), EXTENT) as file:
        while count := file.readinto(buffer):
            digests.append(hash_extent(buffer[:count]))
            size += count
    return FileRecord(size, tuple(digests))


def verify_file(path: Path, record: FileRecord) -> None:
    """Read a whole file. Raises DamagedError if its length or an extent differs from `record`."""
    for error in find_damage(path.parent, {path.name: record}):
        raise error
