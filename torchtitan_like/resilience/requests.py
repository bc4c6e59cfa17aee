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

from torchtitan_like.util.exit_codes import ExitCode


class Request(IntEnum):
    """The order of this table is the order of the counts on the wire; the first stop asked for wins."""

    BAD_NUMBERS = 0
    SAVE_FAILED = 1
    WRITE_FAILED = 2
    KILL = 3
    INTERRUPT = 4
    TERMINATE = 5
    DEADLINE = 6
    HOST_MEMORY = 7
    GPU_MEMORY = 8
    DATA_EXHAUSTED = 9
    SAVE = 10
    EXPORT = 11


# The requests that end the run, and with which code; the others ask for something in passing.
EXIT_CODES = {
    Request.BAD_NUMBERS: ExitCode.BAD_NUMBERS,
    Request.SAVE_FAILED: ExitCode.STORAGE,
    Request.WRITE_FAILED: ExitCode.STORAGE,
    Request.KILL: ExitCode.INTERRUPTED,
    Request.INTERRUPT: ExitCode.INTERRUPTED,
    Request.TERMINATE: ExitCode.REQUEUE,
    Request.DEADLINE: ExitCode.REQUEUE,
    Request.HOST_MEMORY: ExitCode.REQUEUE,
    Request.GPU_MEMORY: ExitCode.REQUEUE,
    Request.DATA_EXHAUSTED: ExitCode.DONE,
}
SIGNALS = {
    signal.SIGINT: Request.INTERRUPT,
    signal.SIGTERM: Request.TERMINATE,
    signal.SIGUSR1: Request.TERMINATE,  # Slurm's notice, where no launcher stands between (torchrun dies of it)
}


class Stopped(BaseException):
    """A signal before the first step: nothing is lost, and no peer waits for an agreement."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"stopped before the first step ({request.name})")
        self.request = request


class Requests:
    """The requests this rank has noted since the last time they were put on the wire."""

    def __init__(self) -> None:
        self._noted: set[Request] = set()
        self.only_note = False  # signals; from the first step on, and while the process ends

    def note(self, request: Request) -> None:
        self._noted.add(request)

    def take(self) -> list[int]:
        """Counts for the wire, one per `Request`. A request is sent once; noting it again sends it again."""
        taken, self._noted = self._noted, set()  # counted behind that: a signal may come between any two operations
        return [int(request in taken) for request in Request]

    def noted(self) -> list[int]:
        """As `take`, and they will be sent all the same."""
        return [int(request in self._noted) for request in Request]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the signals of `SIGNALS` into requests in here. As long as none would reach the wire, the first one raises
        `Stopped`; another must not disturb what that leads to. Afterwards the former handlers are back.
        """

        def handler(signum: int, _frame: FrameType | None) -> None:
            request = SIGNALS[signal.Signals(signum)]
            if self.only_note:
                self.note(request)
            else:
                self.only_note = True
                raise Stopped(request)

        former = {signum: signal.signal(signum, handler) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, old in former.items():
                signal.signal(signum, old)


def agreed(counts: list[int]) -> list[Request]:
    """What any rank has asked for, in the order of the table, from the summed counts."""
    return [request for request, count in zip(Request, counts, strict=True) if count]


def stop_among(requests: list[Request]) -> Request | None:
    """The first of `requests` that ends the run."""
    return next((request for request in requests if request in EXIT_CODES), None)
