"""Saving by the clock, and what saving costs."""

from __future__ import annotations

import time
from collections.abc import Callable


class Intervals:
    """`checkpoint.interval_minutes`, and the share of the run for which training stood still to save.

    Clocks differ between ranks: only one rank's answer counts, and the others are told.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._begin = self._last_save = clock()
        self._stood = 0.0
        self._num_saves = 0

    def are_over(self) -> bool:
        """Have the minutes passed since the last save, or since the start? Never, when they are 0.

        Said once: the minutes count anew from then on, as the save asked for comes some steps later.
        """
        now = self._clock()
        over = 0 < self._seconds <= now - self._last_save
        if over:
            self._last_save = now
        return over

    def saved(self) -> None:
        """Take note of a save: the minutes count anew."""
        self._last_save = self._clock()
        self._num_saves += 1

    def stood(self, seconds: float) -> None:
        """Take note that training stood still for a save."""
        self._stood += seconds

    def cost(self) -> str:
        """`3 saves took 4.2 seconds, 1.05% of the run`."""
        share = self._stood / max(self._clock() - self._begin, self._stood, 1e-9)
        saves = "1 save" if self._num_saves == 1 else f"{self._num_saves} saves"
        return f"{saves} took {self._stood:.1f} seconds, {share:.2%} of the run"
