"""Resident memory of this process, as Linux reports it under /proc.

`getrusage` does not serve here: a started program's `ru_maxrss` is at least that of the process
that started it.
"""

from __future__ import annotations


def resident_bytes() -> int:
    """Return the resident memory now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident memory since the start, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Set the peak to the resident memory of now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
