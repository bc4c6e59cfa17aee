"""Requests: actions that one rank requests of all ranks, such as stopping or saving a checkpoint.

A rank only *records* a request. The agreement of a step sends it as a count: one int64 vector per
rank, summed over all ranks. The all-reduce overlaps with the previous step. All ranks act on a
request at the same step, at most two steps later.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_like.util import run_directory
from torchtitan_like.util.exit_codes import RANK_SIGNALS, ExitCode

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Resilience
    from torchtitan_like.distributed.world import HostGroup, PendingSum


class Request(IntEnum):
    """A request. Its number is its index in a `StepAgreement`. Of several stops, the first wins."""

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
    RUN_AGAIN = 12


# The requests that end the run, with its exit code. The run continues after the others.
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


class Stopped(BaseException):
    """A signal before the first step. No progress is lost, and no rank waits for an agreement."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"stopped before the first step ({request.name})")
        self.request = request


class Requests:
    """The pending requests of this rank, which it has not sent yet."""

    def __init__(self) -> None:
        self._pending: set[Request] = set()
        # If True, a signal adds a request and raises nothing: from the first step to the end.
        self.defer_signals = False

    def add(self, request: Request) -> None:
        """Send `request` with the next step."""
        self._pending.add(request)

    def has_stop(self) -> bool:
        """Return True if a pending request ends the run."""
        return any(request in EXIT_CODES for request in self._pending)

    def take(self) -> list[int]:
        """Return the counts to send, one per `Request`, and clear the pending requests."""
        # Swap before counting: a signal may arrive between any two operations.
        pending, self._pending = self._pending, set()
        return [int(request in pending) for request in Request]

    def counts(self) -> list[int]:
        """Return the counts like `take`, but keep them for the next `take`."""
        return [int(request in self._pending) for request in Request]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Convert signals to requests inside the block, and restore the handlers after it.

        Before the first step no request would be sent, so the first signal raises `Stopped`. Later
        signals become pending and do not interrupt its handling.
        """

        def handler(signum: int, _frame: FrameType | None) -> None:
            request = Request.INTERRUPT if signum == signal.SIGINT else Request.TERMINATE
            if self.defer_signals:
                self.add(request)
            else:
                self.defer_signals = True
                raise Stopped(request)

        former = {signum: signal.signal(signum, handler) for signum in RANK_SIGNALS}
        try:
            yield
        finally:
            for signum, old in former.items():
                signal.signal(signum, old)


class Switches:
    """Reads the switch files of a run, on rank 0 only. The step's agreement shares the requests."""

    def __init__(self, run: Path, section: Resilience) -> None:
        paths = run_directory.switch_paths(run, section.kill_switch_path, section.save_switch_path)
        self.kill = paths.kill
        self._once = {paths.save: Request.SAVE, paths.export: Request.EXPORT}

    def read(self) -> list[Request]:
        """Return the requests of the files. Removes SAVE and EXPORT; KILL stays for later runs."""
        requests = [Request.KILL] if self.kill.exists() else []
        for path, request in self._once.items():
            try:
                path.unlink()
            except OSError:
                continue
            requests.append(request)
        return requests


def first_stop(requests: Sequence[Request]) -> Request | None:
    """Return the first of `requests` that ends the run, or None."""
    return next((request for request in requests if request in EXIT_CODES), None)


class StepAgreement(NamedTuple):
    """One rank's contribution, or the sum over all ranks, which is equal on every rank.

    num_valid_tokens: labels of the step, counted once per data shard.
    digest_low, digest_high: 32-bit halves of the data digest. Their sums over ranks fit in int64.
    request_counts: the number of ranks that send each `Request`.
    """

    num_valid_tokens: int
    digest_low: int
    digest_high: int
    request_counts: tuple[int, ...]

    @classmethod
    def of_rank(
        cls, num_valid_tokens: int, data_digest: int, request_counts: Sequence[int]
    ) -> StepAgreement:
        """Return one rank's contribution. data_digest: unsigned, 64 bits."""
        low = data_digest & 0xFFFFFFFF
        return cls(num_valid_tokens, low, data_digest >> 32, tuple(request_counts))

    @classmethod
    def decode(cls, vector: Sequence[int]) -> StepAgreement:
        """Read the vector that `encode` wrote, or a sum of such vectors."""
        num_valid_tokens, digest_low, digest_high, *counts = vector
        return cls(num_valid_tokens, digest_low, digest_high, tuple(counts))

    def encode(self) -> list[int]:
        """Return the int64 vector for the wire."""
        return [self.num_valid_tokens, self.digest_low, self.digest_high, *self.request_counts]

    @property
    def data_digest(self) -> int:
        """The sum of the ranks' data digests modulo 2**64."""
        return (self.digest_low + (self.digest_high << 32)) % 2**64

    @property
    def requests(self) -> list[Request]:
        """The requests of any rank, in the order of `Request`."""
        counts = zip(Request, self.request_counts, strict=True)
        return [request for request, count in counts if count]


@dataclass(frozen=True)
class PendingAgreement:
    """The all-reduce of an agreement in progress."""

    total: PendingSum

    def wait(self) -> StepAgreement:
        """Block until every rank has contributed."""
        return StepAgreement.decode(self.total.wait())


def send(local: StepAgreement, group: HostGroup) -> PendingAgreement:
    """Start the all-reduce of every rank's contribution. A collective of `group`."""
    return PendingAgreement(group.sum_async(local.encode()))
