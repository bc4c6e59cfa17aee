"""Measure the free space of a disk, and the number of checkpoints that fit."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.util.run_directory import MANIFEST, steps_below


@dataclass(frozen=True)
class Space:
    """Free bytes and inodes; num_inodes is None on a file system without a limit."""

    num_bytes: int
    num_inodes: int | None


@dataclass(frozen=True)
class CheckpointSize:
    """Size of a run's newest checkpoint. seconds: time since the previous checkpoint, or None."""

    num_bytes: int
    num_files: int
    seconds: float | None


def free_space(path: Path) -> Space:
    """Return the free space for this user at `path`. Raises OSError."""
    stats = os.statvfs(path)
    return Space(stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None)


def disk_usage(folder: Path) -> tuple[int, int]:
    """Return bytes on disk and number of files below a folder, as `du` counts them.

    Skips files that are deleted during the count.
    """
    num_bytes = num_files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
            num_files += 1
    return num_bytes, num_files


def newest_checkpoint(run: Path) -> CheckpointSize | None:
    """Measure a run's newest checkpoint, in a checkpoint folder of any name."""
    times = {}
    for _, step in steps_below(run):
        with suppress(FileNotFoundError):  # a live run deletes old checkpoints
            times[step] = (step / MANIFEST).stat().st_mtime
    if not times:
        return None
    newest = max(times, key=times.__getitem__)
    ordered = sorted(times.values())
    seconds = ordered[-1] - ordered[-2] if len(ordered) > 1 else None
    return CheckpointSize(*disk_usage(newest), seconds=seconds)


def checkpoints_left(space: Space, size: CheckpointSize) -> int:
    """Return how many checkpoints of this size still fit."""
    by_bytes = space.num_bytes // max(1, size.num_bytes)
    if space.num_inodes is None:
        return by_bytes
    return min(by_bytes, space.num_inodes // max(1, size.num_files))
