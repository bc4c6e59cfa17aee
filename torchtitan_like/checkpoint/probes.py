"""Check free space, write access, and visibility on all ranks before a checkpoint is written."""

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
from torchtitan_like.util.units import GIB

_OVERHEAD_FACTOR = 1.02  # of the file system
_RESERVED_BYTES = 64 * 2**20  # for the run's other files
_MARKER = ".visible-to-all-ranks"


def check_space(folder: Path, needed_bytes: int, needed_files: int = 0) -> None:
    """Raise CheckpointError if the file system of `folder` has no room for a checkpoint."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    needed = needed_bytes * _OVERHEAD_FACTOR + _RESERVED_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / GIB:.2f} GiB free. Expected {needed / GIB:.2f} GiB for a "
            "checkpoint. Free some space, lower checkpoint.keep_latest_k, or choose another "
            "job.dump_folder"
        )
    if stat.f_files and stat.f_favail < needed_files:
        raise CheckpointError(
            f"{folder} has room for {stat.f_favail:,} more files (inodes). Expected "
            f"{needed_files:,} for a checkpoint. Remove some files, or choose another "
            "job.dump_folder"
        )


def check_writable(folder: Path) -> None:
    """Write, read, and remove a small file. Raises CheckpointError if that fails."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    token = uuid.uuid4().bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        content = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"No checkpoint can be written to {folder}: {error}. Expected a writable folder. Check "
            "its owner, quota, and free space, or choose another job.dump_folder"
        ) from error
    if content != token:
        raise CheckpointError(
            f"A file in {folder} changed after it was written: its file system is faulty. Expected "
            "to read the bytes that were written. Choose another job.dump_folder"
        )


def write_marker(folder: Path) -> str:
    """Write a random token for `wait_for_marker` and return it. Call it on rank 0."""
    token = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).write_text(token)
    return token


def wait_until_visible(
    path: Path,
    is_visible: Callable[[Path], bool] = Path.exists,
    patience: float = 10,
    sleep: Any = time.sleep,
) -> None:
    """Wait until this rank sees a file that rank 0 sees.

    Shared file systems show a new file on other nodes after a delay. Raises CheckpointError if
    `is_visible` returns False for `patience` seconds.
    """
    for _ in range(round(10 * patience) + 1):
        with suppress(OSError):
            if is_visible(path):
                return
        sleep(0.1)
    raise CheckpointError(
        f"{path.parent} on {socket.gethostname()} is not the folder that rank 0 sees: {path.name} "
        f"did not appear within {patience:.0f} s. Expected a file system that all nodes share. Set "
        "job.dump_folder to a shared folder"
    )


def wait_for_marker(folder: Path, token: str, **waiting: Any) -> None:
    """Wait until this rank reads the token of rank 0. `waiting`: see `wait_until_visible`."""
    wait_until_visible(folder / _MARKER, lambda path: path.read_text() == token, **waiting)


def remove_marker(folder: Path) -> None:
    """Remove the marker. Call it on rank 0 after all ranks have seen it."""
    (folder / _MARKER).unlink(missing_ok=True)
