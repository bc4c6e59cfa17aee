"""What ends a run from outside: a deadline, and memory that runs out."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan_like.resilience.requests import Request

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience

logger = logging.getLogger()

INTERVAL = 5.0  # seconds between two looks at the memory
GIB = 1024**3
CGROUP = Path("/sys/fs/cgroup")


class Limits:
    """The limits of `[resilience]`: which of them this rank has reached.

    keeps_time: on one rank alone; the others hear of a deadline from it. ``began``: of the process, in seconds since 1970, as
    ``clock`` counts.
    """

    def __init__(
        self,
        section: Resilience,
        device: torch.device,
        *,
        keeps_time: bool = True,
        began: float | None = None,
        clock: Callable[[], float] = time.time,
        used_percent: Callable[[], float] | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._clock, self._section = clock, section
        self._used_percent = used_percent or used_memory_percent
        self._free_bytes = free_bytes or (lambda: torch.cuda.mem_get_info(device)[0])
        self._looks_at_gpu = section.min_free_gpu_gib > 0 and (
            device.type == "cuda" or free_bytes is not None
        )
        self._next_look = clock()
        self._has_warned_of_grace = False
        self.deadline = self._find_deadline(began) if keeps_time else None

    def _find_deadline(self, began: float | None) -> float | None:
        minutes, grace = self._section.max_runtime_minutes, self._section.grace_seconds
        if minutes == 0:
            return None
        if minutes != "auto":
            deadline = (began_at() if began is None else began) + 60 * minutes
        elif (end := end_of_slurm_job(os.environ)) is not None:
            deadline = end - grace
        else:
            logger.warning(
                "resilience.max_runtime_minutes = 'auto' has no effect: this is no Slurm job, or one whose end is not known. "
                "Give a number of minutes"
            )
            return None
        logger.info(
            f"The run saves and ends at {datetime.fromtimestamp(deadline).astimezone().isoformat(' ', 'seconds')}"
        )
        return deadline

    def reached(self) -> list[Request]:
        """Clocks differ between ranks, memory between hosts: each rank tells of its own, and all act on it together."""
        now = self._clock()
        found = [Request.DEADLINE] if self.deadline is not None and now >= self.deadline else []
        if now >= self._next_look:
            self._next_look = now + INTERVAL
            if (
                self._section.max_cpu_mem_percent < 100
                and self._used_percent() > self._section.max_cpu_mem_percent
            ):
                found.append(Request.HOST_MEMORY)
            if self._looks_at_gpu and self._gpu_is_full():
                found.append(Request.GPU_MEMORY)
        return found

    def grace_warning(self, step_seconds: float, save_seconds: float) -> str | None:
        """Whether the scheduler's grace is too short for a save of this run: what to say of it, once.

        Twice a step and a save: a signal comes at the begin of a step, and the save after it may wait for the disk.
        """
        needed, grace = 2 * (step_seconds + save_seconds), self._section.grace_seconds
        if needed <= grace or self._has_warned_of_grace:
            return None
        self._has_warned_of_grace = True
        return (
            f"A scheduler's signal must come {needed:.0f} s before the kill (2 x (a step of {step_seconds:.1f} s + a save of "
            f"{save_seconds:.1f} s)), and resilience.grace_seconds is {grace:g}: raise both it and the scheduler's notice "
            "(sbatch --signal=B:USR1@SECONDS, or terminationGracePeriodSeconds)"
        )

    def _gpu_is_full(self) -> bool:
        """What the allocator keeps in reserve counts as free: it is given back before anything is decided."""
        least = self._section.min_free_gpu_gib * GIB
        if self._free_bytes() >= least:
            return False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._free_bytes() < least


def began_at() -> float:
    """When this process began, in seconds since 1970."""
    import psutil

    began: float = psutil.Process().create_time()
    return began


def used_memory_percent(root: Path = CGROUP) -> float:
    """How much of the memory that this job may use is in use: the host's, or its cgroup's where that is fuller.

    Caches that the kernel can take back do not count.
    """
    import psutil  # 20 ms, for those who ask for it

    host: float = psutil.virtual_memory().percent
    try:
        own = (
            Path("/proc/self/cgroup")
            .read_text(encoding="utf-8")
            .rpartition("::")[2]
            .strip()
            .lstrip("/")
        )
        folders = [
            root / own,
            *(parent for parent in (root / own).parents if parent.is_relative_to(root)),
        ]
    except OSError:
        return host
    return max([host, *(share for folder in folders if (share := _share_of(folder)) is not None)])


def _share_of(folder: Path) -> float | None:
    """Percent of a cgroup's (version 2) limit in use; None where it has none."""
    try:
        most = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    stat = dict(line.split() for line in lines)
    return None if most == "max" else 100 * (used - int(stat.get("inactive_file", 0))) / int(most)


def end_of_slurm_job(environ: Mapping[str, str]) -> float | None:
    """When Slurm will end this job, in seconds since 1970; None outside a job, and for one without an end."""
    if "SLURM_JOB_ID" not in environ:
        return None
    known = environ.get(
        "SLURM_JOB_END_TIME"
    )  # as it was when the job began; somebody may have changed it since
    command = ["scontrol", "show", "-d", "job", environ["SLURM_JOB_ID"]]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None if known is None else float(known)
    ends = [word.partition("=")[2] for word in text.split() if word.startswith("EndTime=")]
    return datetime.fromisoformat(ends[0]).timestamp() if ends and ends[0] != "Unknown" else None
