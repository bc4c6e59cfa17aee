"""Measure the memory of a step: the CUDA allocator's pools, or the resident set on a CPU.

The numbers come from the allocator, not from nvidia-smi, which shows the memory of the process with
caches. nvidia-smi cannot reveal that a run frees and re-allocates memory in each step.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torchtitan_like.monitor.log import logger
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryReading:
    """Memory in GiB and percent of the capacity, for log lines; scalars for dashboards by name."""

    gib: float
    percent: float
    scalars: dict[str, float]


class CudaMemoryMonitor:
    """Peaks of the CUDA caching allocator. Warns after allocation retries and out-of-memory errors.

    stats: returns the keys of ``torch.cuda.memory_stats``. reset_peaks: resets the peaks.
    """

    def __init__(
        self,
        device_name: str,
        capacity_bytes: int,
        stats: Callable[[], Mapping[str, Any]],
        reset_peaks: Callable[[], None],
    ) -> None:
        self.device_name = device_name
        self.capacity_gib = capacity_bytes / GIB
        self._stats = stats
        self._reset_peaks = reset_peaks
        self._last_counts = {"num_alloc_retries": 0, "num_ooms": 0}
        self.reset()

    def read(self) -> MemoryReading:
        """Return the peaks since the last reset. ``gib`` is the reserved memory.

        Retries and OOMs are counted from the start of the process.
        """
        stats = self._stats()
        active, reserved = (self._gib(stats, kind, "all") for kind in ("active", "reserved"))
        counts = {name: int(stats.get(name, 0)) for name in self._last_counts}
        self._warn_of_new(counts, stats)
        percent = 100.0 / self.capacity_gib
        scalars = {
            "memory/max_active(GiB)": active,
            "memory/max_active(%)": active * percent,
            "memory/max_reserved(GiB)": reserved,
            "memory/max_reserved(%)": reserved * percent,
            **{f"memory/{name}": float(count) for name, count in counts.items()},
        }
        return MemoryReading(reserved, reserved * percent, scalars)

    def reset(self) -> None:
        self._reset_peaks()

    def describe(self) -> str:
        return f"CUDA capacity: {self.device_name} with {self.capacity_gib:.2f}GiB memory"

    def _warn_of_new(self, counts: dict[str, int], stats: Mapping[str, Any]) -> None:
        increases = {name: count - self._last_counts[name] for name, count in counts.items()}
        self._last_counts = counts
        if not any(increases.values()):
            return
        pools = ", ".join(
            f"{pool} pool {self._gib(stats, 'active', f'{pool}_pool'):.2f}GiB active"
            f" of {self._gib(stats, 'reserved', f'{pool}_pool'):.2f}GiB reserved"
            for pool in ("small", "large")
        )
        events = " and ".join(
            f"{count} {name.removeprefix('num_')}" for name, count in increases.items() if count
        )
        logger.warning(
            f"CUDA memory is short: {events} since the last report (peaks: {pools}). "
            f"Each retry empties the cache and stalls the device. {oom_advice()}"
        )

    @staticmethod
    def _gib(stats: Mapping[str, Any], kind: str, pool: str) -> float:
        return float(stats.get(f"{kind}_bytes.{pool}.peak", 0)) / GIB


class HostMemoryMonitor:
    """Resident set of this process, and its share of the host's memory.

    rss_bytes: returns the resident set in bytes.
    """

    def __init__(self, device_name: str, capacity_bytes: int, rss_bytes: Callable[[], int]) -> None:
        self.device_name = device_name
        self.capacity_gib = capacity_bytes / GIB
        self._rss_bytes = rss_bytes

    def read(self) -> MemoryReading:
        """Return the current resident set. The kernel has no peak that is cheap to reset."""
        gib = self._rss_bytes() / GIB
        percent = 100.0 * gib / self.capacity_gib
        return MemoryReading(gib, percent, {"memory/rss(GiB)": gib, "memory/rss(%)": percent})

    def reset(self) -> None:
        """Do nothing: ``read`` returns the current value."""

    def describe(self) -> str:
        return f"CPU capacity: {self.device_name} with {self.capacity_gib:.2f}GiB memory"


MemoryMonitor: TypeAlias = CudaMemoryMonitor | HostMemoryMonitor


def build_memory_monitor(device: torch.device) -> MemoryMonitor:
    """Return the memory monitor of ``device``.

    On CUDA, this empties the allocator's cache and resets its peaks.
    """
    if device.type != "cuda":
        import psutil  # takes 20 ms; only runs without a GPU need it

        process = psutil.Process()  # once: a new one reads several files of /proc
        return HostMemoryMonitor(
            cpu_model(), host_memory_bytes(), lambda: process.memory_info().rss
        )
    import torch

    properties = torch.cuda.get_device_properties(device)
    torch.cuda.empty_cache()
    return CudaMemoryMonitor(
        properties.name,
        properties.total_memory,
        lambda: torch.cuda.memory_stats(device),
        lambda: torch.cuda.reset_peak_memory_stats(device),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` or its cause is an out-of-memory error.

    These are CUDA's OutOfMemoryError, the CPU allocator's RuntimeError, and MemoryError.
    """
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if "DefaultCPUAllocator" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def oom_advice() -> str:
    """Return the remedies for a lack of memory, in order of their cost in speed."""
    return (
        "Remedies, cheapest first: (1) activation_checkpoint.mode = 'selective', then 'full'; (2) "
        "halve training.local_batch_size and keep training.global_batch_size: gradient "
        "accumulation gives the same loss; (3) reduce loss.chunk_mib: fewer logits exist at a "
        "time; (4) if host memory is available, activation_checkpoint.mode = 'offload'."
    )


def host_memory_bytes() -> int:
    """Return the physical memory of the host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_model() -> str:
    """Return the processor's name, or the machine's architecture if the name is unknown."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
