"""How much memory the step really needed: the CUDA allocator's pools, or this process's resident set on a CPU.

The allocator's own counters are read, not nvidia-smi's: that one shows what the process holds, caches included, and so
cannot tell a comfortable run from one that frees and re-allocates at each step.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torchtitan_like.monitor.log import logger
from torchtitan_like.util.host_memory import GIB

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryReading:
    """What one log line shows: GiB and percent of the capacity, and the scalars for dashboards by name."""

    gib: float
    percent: float
    scalars: dict[str, float]


class CudaMemoryMonitor:
    """Peaks of the CUDA caching allocator; warns when it had to free and retry, or ran out.

    ``stats`` has the keys of ``torch.cuda.memory_stats``; ``reset_peaks`` starts the peaks anew.
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
        self._seen = {"num_alloc_retries": 0, "num_ooms": 0}
        self.reset()

    def read(self) -> MemoryReading:
        """Peaks since the last reset; ``gib`` is the reserved memory. Retries and OOMs count from process start."""
        stats = self._stats()
        active, reserved = (self._gib(stats, kind, "all") for kind in ("active", "reserved"))
        counts = {name: int(stats.get(name, 0)) for name in self._seen}
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
        new = {name: count - self._seen[name] for name, count in counts.items() if count > self._seen[name]}
        self._seen = counts
        if not new:
            return
        pools = ", ".join(
            f"{pool} pool {self._gib(stats, 'active', f'{pool}_pool'):.2f}GiB active"
            f" of {self._gib(stats, 'reserved', f'{pool}_pool'):.2f}GiB reserved"
            for pool in ("small", "large")
        )
        what = " and ".join(f"{count} {name.removeprefix('num_')}" for name, count in new.items())
        logger.warning(
            f"CUDA memory is short: {what} since the last report (peaks: {pools}). "
            f"Each retry empties the cache and stalls the device. {oom_advice()}"
        )

    @staticmethod
    def _gib(stats: Mapping[str, Any], kind: str, pool: str) -> float:
        return float(stats.get(f"{kind}_bytes.{pool}.peak", 0)) / GIB


class HostMemoryMonitor:
    """Resident set of this process, and its share of the host's memory. ``rss_bytes`` is injected for tests."""

    def __init__(self, device_name: str, capacity_bytes: int, rss_bytes: Callable[[], int]) -> None:
        self.device_name = device_name
        self.capacity_gib = capacity_bytes / GIB
        self._rss_bytes = rss_bytes

    def read(self) -> MemoryReading:
        """The resident set now (the kernel keeps no peak that one process could restart cheaply)."""
        gib = self._rss_bytes() / GIB
        percent = 100.0 * gib / self.capacity_gib
        return MemoryReading(gib, percent, {"memory/rss(GiB)": gib, "memory/rss(%)": percent})

    def reset(self) -> None:
        """Nothing to restart: ``read`` shows the present."""

    def describe(self) -> str:
        return f"CPU capacity: {self.device_name} with {self.capacity_gib:.2f}GiB memory"


MemoryMonitor: TypeAlias = CudaMemoryMonitor | HostMemoryMonitor


def build_memory_monitor(device: torch.device) -> MemoryMonitor:
    """The monitor of ``device``'s memory. On CUDA it empties the allocator's cache and restarts its peaks."""
    if device.type != "cuda":
        return HostMemoryMonitor(cpu_model(), host_memory_bytes(), resident_bytes)
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
    """Whether ``error`` or its cause is one: CUDA's OutOfMemoryError, the CPU allocator's RuntimeError, a MemoryError."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error) or bool(error.__cause__ and is_out_of_memory(error.__cause__))


def oom_advice() -> str:
    """What to change first when memory runs out, cheapest in speed first."""
    return (
        "What to try, cheapest first: (1) activation_checkpoint.mode = 'selective', then 'full'; (2) half "
        "training.local_batch_size and keep training.global_batch_size: gradient accumulation makes up for it and the "
        "loss stays the same; (3) a smaller loss.chunk_mib: fewer logits exist at one time; (4) where host memory is "
        "free, activation_checkpoint.mode = 'offload'."
    )


def resident_bytes() -> int:
    """Resident set of this process in bytes."""
    import psutil  # 20 ms, for runs without a GPU

    found: int = psutil.Process().memory_info().rss
    return found


def host_memory_bytes() -> int:
    """Physical memory of the host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_model() -> str:
    """The processor's name, or the machine's architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
