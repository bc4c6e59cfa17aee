"""Observe a run from outside: its job, its log, and its disk."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.report.disk import (
    Space,
    checkpoints_left,
    disk_usage,
    free_space,
    newest_checkpoint,
)
from torchtitan_like.util.units import GIB


@dataclass(frozen=True)
class Observation:
    """A line for the log. is_alert: the line is also sent to a person."""

    message: str
    is_alert: bool


@dataclass(frozen=True)
class Limits:
    """What a disk must have left. days: of checkpoints, at the interval of the last two."""

    free_gib: float = 0
    free_inodes: int = 0
    checkpoints: int = 0
    days: float = 0


def observe_job(
    name: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Observation:
    """Return whether Slurm runs or queues a job `name` of this user. Raises OSError."""
    command = ["squeue", "--noheader", "--me", f"--name={name}", "--format=%i %T"]
    done = run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
    jobs = [line.split() for line in done.stdout.splitlines() if line.strip()]
    over = ("COMPLETING", "COMPLETED")
    alive = [f"{job} {state.lower()}" for job, state in jobs if state not in over]
    return Observation(f"job {name}: {', '.join(alive) or 'neither running nor queued'}", not alive)


def observe_log(file: Path, max_silence: float, now: float) -> Observation:
    """Return whether `file` was written in the last `max_silence` minutes."""
    try:
        silence = (now - file.stat().st_mtime) / 60
    except FileNotFoundError:
        return Observation(f"log {file}: it does not exist", True)
    message = f"log {file}: written {silence:.0f} min ago (at most {max_silence:g})"
    return Observation(message, silence > max_silence)


def observe_disk(
    path: Path, limits: Limits, free_command: str | None, quota_gib: float | None
) -> Observation:
    """Return whether bytes, inodes and room for checkpoints are left at `path`.

    free_command: prints free bytes [and inodes]. quota_gib: GiB that `path` may contain.
    Raises OSError, ValueError.
    """
    free = space_of_command(free_command) if free_command else free_space(path)
    if quota_gib is not None:
        left = int(quota_gib * GIB) - disk_usage(path)[0]
        free = Space(min(free.num_bytes, left), free.num_inodes)
    facts = [f"{free.num_bytes / GIB:,.1f} GiB free (at least {limits.free_gib:g})"]
    alerts = [free.num_bytes < limits.free_gib * GIB]
    if free.num_inodes is not None:
        facts.append(f"{free.num_inodes:,} inodes free (at least {limits.free_inodes:,})")
        alerts.append(free.num_inodes < limits.free_inodes)
    size = newest_checkpoint(path)
    if size is not None:
        count = checkpoints_left(free, size)
        facts.append(f"{count:,} checkpoints left (at least {limits.checkpoints})")
        alerts.append(count < limits.checkpoints)
        if size.seconds:
            days = count * size.seconds / 86400
            facts.append(f"{days:.1f} days of checkpoints left (at least {limits.days:g})")
            alerts.append(days < limits.days)
    return Observation(f"disk {path}: {', '.join(facts)}", any(alerts))


def space_of_command(command: str) -> Space:
    """Return the free bytes and inodes that `command` prints. Raises ValueError."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    numbers = done.stdout.split()
    if (
        done.returncode != 0
        or not 1 <= len(numbers) <= 2
        or not all(word.isdecimal() for word in numbers)
    ):
        raise ValueError(
            f"{command}: printed {done.stdout + done.stderr!r}. Expected the free bytes [and free "
            "inodes]. Correct --free-command."
        )
    return Space(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)
