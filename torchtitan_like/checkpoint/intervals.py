"""Save checkpoints at time intervals, and measure what saving costs."""

from __future__ import annotations

import time
from collections.abc import Callable


class Intervals:
    """Times `checkpoint.interval_minutes` and the fraction of the run during which saving blocks.

    Clocks differ between ranks, so one rank decides for all.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._start = self._last_save = clock()
        self._blocked_seconds = 0.0
        self._num_checkpoints = 0

    def are_over(self) -> bool:
        """Return True if the interval has passed since the last checkpoint or the start.

        Restarts the interval, because the checkpoint follows some steps later. Always False if the
        interval is 0.
        """
        now = self._clock()
        is_over = 0 < self._seconds <= now - self._last_save
        if is_over:
            self._last_save = now
        return is_over

    def record_checkpoint(self) -> None:
        """Count a checkpoint and restart the interval."""
        self._last_save = self._clock()
        self._num_checkpoints += 1

    def record_blocked(self, seconds: float) -> None:
        """Add time for which saving blocked training."""
        self._blocked_seconds += seconds

    def cost(self) -> str:
        """Return a line such as `3 checkpoints took 4.2 seconds, 1.05% of the run`."""
        run_seconds = max(self._clock() - self._start, self._blocked_seconds, 1e-9)
        fraction = self._blocked_seconds / run_seconds
        noun = "checkpoint" if self._num_checkpoints == 1 else "checkpoints"
        return (
            f"{self._num_checkpoints} {noun} took {self._blocked_seconds:.1f} seconds, "
            f"{fraction:.2%} of the run"
        )
