"""Is there room, can it be written, do all ranks see it? Asked before a save, not after half of it."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.errors import CheckpointError

GIB = 2**30
_MARGIN = 1.02, 64 * 2**20  # file-system overhead, and what the run writes besides: factor, bytes
_MARKER = ".visible-to-all-ranks"


def check_space(folder: Path, needed_bytes: int, needed_files: int = 0) -> None:
    """Raise CheckpointError unless `folder`, or the folder it will lie in, has room for a save of that size."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = os.statvfs(existing)
    free = found.f_bavail * found.f_frsize
    needed = needed_bytes * _MARGIN[0] + _MARGIN[1]
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / GIB:.2f} GiB free, a save needs {needed / GIB:.2f} GiB. Free some, lower "
            "checkpoint.keep_latest_k, or choose another job.dump_folder"
        )
    if found.f_files and found.f_favail < needed_files:
        raise CheckpointError(
            f"{folder} has room for {found.f_favail:,} more files (inodes), a save needs {needed_files:,}. Remove some, "
            "or choose another job.dump_folder"
        )


def check_writable(folder: Path) -> None:
    """Write, read back and remove a small file; raises CheckpointError with what the file system says."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    token = uuid.uuid4().bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        found = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written to {folder}: {error}. Check its owner, quota and free space, or choose "
            "another job.dump_folder"
        ) from error
    if found != token:
        raise CheckpointError(
            f"{folder} does not give back what was written to it: its file system is faulty"
        )


def write_marker(folder: Path) -> str:
    """Rank 0: put a random word where every rank must be able to read it; the word."""
    token = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).write_text(token)
    return token


def see(
    path: Path,
    is_it: Callable[[Path], bool] = Path.exists,
    patience: float = 10,
    sleep: Any = time.sleep,
) -> None:
    """Every rank: find what rank 0 sees; raises CheckpointError when it does not appear in `patience` seconds.

    Shared file systems show a new file a little later on other nodes.
    """
    for _ in range(round(10 * patience) + 1):
        with suppress(OSError):
            if is_it(path):
                return
        sleep(0.1)
    raise CheckpointError(
        f"{path.parent} on {socket.gethostname()} is not the folder that rank 0 sees: {path.name} did not appear there within "
        f"{patience:.0f} s. With several nodes it must lie on a file system that all of them share"
    )


def see_marker(folder: Path, token: str, **waiting: Any) -> None:
    """Every rank: find the word that rank 0 wrote. `waiting`, and what it raises: as `see`."""
    see(folder / _MARKER, lambda path: path.read_text() == token, **waiting)


def remove_marker(folder: Path) -> None:
    """Rank 0, when all have seen it."""
    (folder / _MARKER).unlink(missing_ok=True)
