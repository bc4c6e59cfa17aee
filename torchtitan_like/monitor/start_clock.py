"""Report what a run does until its first step is done, so that no start is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from torchtitan_like.monitor.log import logger
from torchtitan_like.util.output import on_screen

INTERVAL = 10.0  # seconds between two reports of a part that takes long


class StartClock:
    """Logs the parts of a start, and the seconds that each has taken.

    Inside its `with` block, a thread also reports a part every `INTERVAL` seconds while it lasts.

    is_leader: False on the ranks that log nothing. clock: returns seconds.
    """

    def __init__(
        self, is_leader: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._is_leader = is_leader
        self._clock = clock
        self._parts: Iterator[str] = iter(())
        self._part: tuple[str, float] | None = None  # and when it began
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._report, name="start clock", daemon=True)

    def plan(self, *parts: str) -> None:
        """Log what will be done until the first step is done, and begin the first part."""
        self._log(f"Until the first step is done: {', '.join(parts)}")
        self._parts = iter(parts)
        self.begin_next()

    def begin_next(self) -> None:
        """Log the seconds of the current part, and begin the next one, if there is one."""
        now = self._clock()
        if self._part is not None:
            former, began = self._part
            self._log(f"Done in {now - began:.1f} s: {former}")
        upcoming = next(self._parts, None)
        self._part = None if upcoming is None else (upcoming, now)
        if upcoming is None:
            self._end.set()

    def __enter__(self) -> StartClock:
        if self._is_leader:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()

    def _report(self) -> None:
        while not self._end.wait(INTERVAL):
            if (part := self._part) is not None:
                self._log(f"{self._clock() - part[1]:.0f} s so far: {part[0]}")

    def _log(self, line: str) -> None:
        if self._is_leader:
            logger.info(line, extra=on_screen())
