"""The host memory and CPU cores of this process, which its machine and control group limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Bytes of host memory: the limit of the machine or control group, and the available part."""

    total: int
    available: int


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Read the smallest limit that applies. Slurm and container runtimes set limits by cgroup.

    The page cache counts as available, because the kernel frees it on demand.
    """
    meminfo = _fields(proc / "meminfo", unit=1024)
    total = meminfo.get("MemTotal:") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [HostMemory(total, meminfo.get("MemAvailable:", total))]
    for folder, names in _groups(proc, cgroups):
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None and limit < total:
            cache = _fields(folder / "memory.stat").get("inactive_file", 0)
            limits.append(HostMemory(limit, max(limit - used + cache, 0)))
    return HostMemory(min(m.total for m in limits), min(m.available for m in limits))


def available_bytes() -> int:
    """Return the bytes of host memory that are available to this process now."""
    return host_memory().available


def num_cores() -> int:
    """Return the number of CPU cores of this process. srun gives a task one by default."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Return this process's control group and its parents, with their limit and usage files."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", V1) if controllers else (cgroups, V2)
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder, names
            folder = folder.parent


def _number(path: Path) -> int | None:
    """Read a number from a file. Return None if the file is missing, or for "max" (no limit)."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers of a file by the word before each of them."""
    rows = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
