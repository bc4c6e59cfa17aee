"""A line of progress for commands that work through a known number of parts."""

from __future__ import annotations

import sys

from torchtitan_like.util.output import show_error
from torchtitan_like.util.units import format_duration

SECONDS_BETWEEN_LINES = 10  # where stderr is not a terminal


class ProgressLine:
    """Prints how many `units` are done, their rate and the time left, to stderr."""

    def __init__(self, units: str) -> None:
        self._units = units
        self._is_terminal = sys.stderr.isatty()
        self._printed_at = 0.0

    def __call__(self, phase: str, done: int, total: int, seconds: float) -> None:
        is_end = done == total
        wait = 0 if self._is_terminal else SECONDS_BETWEEN_LINES
        if total == 0 or (not is_end and 0 < done and seconds < self._printed_at + wait):
            return
        self._printed_at = seconds
        left = ""
        if 0 < done < total:
            rate = done / max(seconds, 1e-9)
            left = f", {rate:.2f}/s, {format_duration((total - done) / rate)} left"
        end = "\r" if self._is_terminal and not is_end else "\n"
        show_error(
            f"{phase}: {done} of {total} {self._units}, {done / total:4.0%}{left}   ", end=end
        )
