"""Format byte counts and durations."""

from __future__ import annotations

import math

MIB = 1024**2
GIB = 1024**3
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Smallest duration in the unit, seconds per unit, digits after the decimal point.
TIME_UNITS = (("days", 2 * 86400, 86400, 1), ("h", 7200, 3600, 1), ("min", 120, 60, 0))


def format_bytes(count: float) -> str:
    """Return a text such as `1.5 GiB`."""
    power = min(len(BYTE_UNITS) - 1, int(math.log(count, 1024))) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {BYTE_UNITS[power]}"


def format_duration(seconds: float) -> str:
    """Return a text such as `90 s`, `12 min`, `5.2 h` or `3.1 days`."""
    for unit, threshold, size, digits in TIME_UNITS:
        if seconds >= threshold:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def format_clock(seconds: float) -> str:
    """Return a text such as `3 d 04:05 h`, `4:05 h`, `5:06 min` or `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    if hours:
        return f"{hours}:{minutes:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
