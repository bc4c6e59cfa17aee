"""What one rank can ask of all: each request is a count in the step's one bookkeeping all-reduce.

A rank only *notes* a request; it is acted on when the all-reduce that carried it is waited for, so every rank acts at
the same step, at most two steps after the note.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from torchtitan_like.resilience.exit_codes import ExitCode


class Request(IntEnum):
    """The order of this table is the order of the counts on the wire; the first one asked for wins."""

    BAD_NUMBERS = 0
    INTERRUPT = 1
    TERMINATE = 2
    DATA_EXHAUSTED = 3


EXIT_CODES = {
    Request.BAD_NUMBERS: ExitCode.BAD_NUMBERS,
    Request.INTERRUPT: ExitCode.INTERRUPTED,
    Request.TERMINATE: ExitCode.REQUEUE,
    Request.DATA_EXHAUSTED: ExitCode.DONE,
}
SIGNALS = {signal.SIGINT: Request.INTERRUPT, signal.SIGTERM: Request.TERMINATE}


class Requests:
    """The requests this rank has noted since the last time they were put on the wire."""

    def __init__(self) -> None:
        self._noted: set[Request] = set()

    def note(self, request: Request) -> None:
        self._noted.add(request)

    def take(self) -> list[int]:
        """Counts for the wire, one per `Request`. A request is sent once; noting it again sends it again."""
        noted, self._noted = self._noted, set()
        return [int(request in noted) for request in Request]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into requests in here; afterwards the former handlers are back."""

        def handler(signum: int, _frame: FrameType | None) -> None:
            self.note(SIGNALS[signal.Signals(signum)])

        former = {signum: signal.signal(signum, handler) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, old in former.items():
                signal.signal(signum, old)


def agreed_stop(counts: list[int]) -> Request | None:
    """The first request of the table that any rank has asked for, from the summed counts."""
    return next((request for request, count in zip(Request, counts, strict=True) if count), None)
