"""External limits that end a run: the deadline, host memory, and GPU memory."""

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

from torchtitan_like.resilience.agreement import Request
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience

logger = logging.getLogger()

INTERVAL = 5.0  # seconds between two memory checks
CGROUP = Path("/sys/fs/cgroup")


class Limits:
    """Checks which limits of `[resilience]` this rank has reached.

    is_leader: True on one rank, which checks the deadline for all ranks.
    start_time: start of the process in seconds since 1970, on the same scale as `clock`.
    """

    def __init__(
        self,
        section: Resilience,
        device: torch.device,
        *,
        is_leader: bool = True,
        start_time: float | None = None,
        clock: Callable[[], float] = time.time,
        used_percent: Callable[[], float] | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._clock = clock
        self._section = section
        self._used_percent = used_percent or used_memory_percent
        self._free_bytes = free_bytes or (lambda: torch.cuda.mem_get_info(device)[0])
        self._checks_gpu = section.min_free_gpu_gib > 0 and (
            device.type == "cuda" or free_bytes is not None
        )
        self._next_check = clock()
        self._has_warned_of_grace = False
        self._has_timed_a_checkpoint = False
        self.deadline = self._find_deadline(start_time) if is_leader else None

    def _find_deadline(self, start_time: float | None) -> float | None:
        minutes, grace = self._section.max_runtime_minutes, self._section.grace_seconds
        if minutes == 0:
            return None
        if minutes != "auto":
            start = process_start_time() if start_time is None else start_time
            deadline = start + 60 * minutes
        elif (end := end_of_slurm_job(os.environ)) is not None:
            deadline = end - grace
        else:
            logger.warning(
                "resilience.max_runtime_minutes = 'auto' has no effect. Expected a Slurm job whose "
                "end is known. Set a number of minutes"
            )
            return None
        date = datetime.fromtimestamp(deadline).astimezone().isoformat(" ", "seconds")
        logger.info(f"The run will save a checkpoint and end at {date}")
        return deadline

    def reached(self) -> list[Request]:
        """Return a request for each limit that this rank has reached.

        Clocks and memory differ between ranks, so each rank sends its requests to all others.
        """
        now = self._clock()
        requests: list[Request] = []
        if self.deadline is not None and now >= self.deadline:
            requests.append(Request.DEADLINE)
        if now >= self._next_check:
            self._next_check = now + INTERVAL
            if (
                self._section.max_cpu_mem_percent < 100
                and self._used_percent() > self._section.max_cpu_mem_percent
            ):
                requests.append(Request.HOST_MEMORY)
            if self._checks_gpu and self._is_gpu_full():
                requests.append(Request.GPU_MEMORY)
        return requests

    def check_grace(self, step_seconds: float, save_seconds: float) -> None:
        """Warn once if the scheduler's grace period is too short for a checkpoint.

        A signal may come at the start of a step, and saving may wait for the disk. The estimate is
        twice the time of a step and a checkpoint.
        """
        self._has_timed_a_checkpoint = True
        needed, grace = 2 * (step_seconds + save_seconds), self._section.grace_seconds
        if needed <= grace or self._has_warned_of_grace:
            return
        self._has_warned_of_grace = True
        logger.warning(
            f"resilience.grace_seconds is {grace:g}, too short to save a checkpoint. Expected at "
            f"least {needed:.0f} s: 2 x (step {step_seconds:.1f} s + checkpoint "
            f"{save_seconds:.1f} s). Raise resilience.grace_seconds and the scheduler's notice "
            "(sbatch --signal=B:USR1@SECONDS or terminationGracePeriodSeconds)"
        )

    def warn_of_untested_grace(self) -> None:
        """Warn if a signal stops the run before its first full checkpoint."""
        if self._has_timed_a_checkpoint:
            return
        logger.warning(
            "The run stops by a signal, and no checkpoint has shown yet whether "
            f"resilience.grace_seconds = {self._section.grace_seconds:g} is enough to save one. "
            "Expected a scheduler that waits for it, but many kill after 30 to 60 s: if no 'Saved' "
            "follows, raise the scheduler's notice"
        )

    def _is_gpu_full(self) -> bool:
        """Return True if too little GPU memory is free even with an empty allocator cache."""
        min_free = self._section.min_free_gpu_gib * GIB
        if self._free_bytes() >= min_free:
            return False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._free_bytes() < min_free


def process_start_time() -> float:
    """Return the start of this process in seconds since 1970."""
    import psutil

    start_time: float = psutil.Process().create_time()
    return start_time


def used_memory_percent(root: Path = CGROUP) -> float:
    """Return the used memory in percent, of the host or of this job's cgroup, whichever is higher.

    Excludes caches that the kernel can reclaim.
    """
    import psutil  # takes 20 ms

    host: float = psutil.virtual_memory().percent
    try:
        line = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return host
    cgroup = root / line.rpartition("::")[2].strip().lstrip("/")
    folders = [cgroup, *(parent for parent in cgroup.parents if parent.is_relative_to(root))]
    percents = [_used_cgroup_percent(folder) for folder in folders]
    return max([host, *(percent for percent in percents if percent is not None)])


def _used_cgroup_percent(folder: Path) -> float | None:
    """Return the used percentage of a version-2 cgroup's limit, or None without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    stat = dict(line.split() for line in lines)
    return None if limit == "max" else 100 * (used - int(stat.get("inactive_file", 0))) / int(limit)


def end_of_slurm_job(environ: Mapping[str, str]) -> float | None:
    """Return when Slurm will end this job, in seconds since 1970.

    Returns None outside of a job and for a job without a time limit.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    # The value from the start of the job. `scontrol update` may have changed the limit since.
    initial_end = environ.get("SLURM_JOB_END_TIME")
    command = ["scontrol", "show", "-d", "job", environ["SLURM_JOB_ID"]]
    # A user's format would give an end such as "Tomorr 10:02".
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, env=env
        ).stdout
        ends = [word.partition("=")[2] for word in text.split() if word.startswith("EndTime=")]
        if not ends or ends[0] == "Unknown":
            return None
        return datetime.fromisoformat(ends[0]).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None if initial_end is None else float(initial_end)
