"""Write the position of each rank to a file, which shows where a run hangs. Kill hung peers."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.util import run_directory
from torchtitan_like.util.files import WriteFailures, write_atomically

logger = logging.getLogger()

INTERVAL = 5.0  # seconds between two checks
# Limits of the load on a shared file system: writes per second over all ranks, and the longest
# pause of a rank in seconds.
MAX_WRITES_PER_SECOND = 500
MAX_PAUSE = 30


class Position(NamedTuple):
    """A phase of a step: "start", "join", "step", "validate", "save" or "end".

    time: Unix time of its start. "join": the rank waits for other replica groups, which is no hang.
    """

    phase: str
    step: int
    micro_batch: int
    time: float


class RankPosition:
    """The current position of this rank, which its heartbeat and the record of a crash report.

    attempt_folder: None before the run has opened an attempt.
    stall_seconds: a rank that stays at one position of a step for longer is hung.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.attempt_folder: Path | None = None
        self.stall_seconds = math.inf
        self.current = Position("start", 0, 0, clock())
        self._clock = clock

    def move(self, phase: str, step: int, micro_batch: int = 0) -> None:
        """Set the position. Takes less than a microsecond."""
        self.current = Position(phase, step, micro_batch, self._clock())

    def step_and_micro_batch(self) -> tuple[int, int]:
        return self.current.step, self.current.micro_batch


class Heartbeat:
    """Writes `heartbeat/rank-<r>.json` from a thread when the rank's position has changed.

    A rank may stay at one position of a step, or at one batch of a validation, for longer than
    `RankPosition.stall_seconds`. It then writes the stacks of all its threads
    (`stacks-rank-<r>.txt`) and its collectives, once per position, before the time-out of a
    collective ends the process.

    trace: the file for the collectives, and a function that returns its content.
    failures: records write errors.
    """

    def __init__(
        self,
        attempt_folder: Path,
        position: RankPosition,
        rank: int,
        clock: Callable[[], float] = time.time,
        *,
        num_ranks: int = 1,
        trace: tuple[Path, Callable[[], bytes]] | None = None,
        failures: WriteFailures | None = None,
    ) -> None:
        self._folder = attempt_folder / run_directory.HEARTBEATS
        self._file = run_directory.heartbeat_file(attempt_folder, rank)
        self._position = position
        self._rank = rank
        self._clock = clock
        self._trace = trace
        self._failures = WriteFailures() if failures is None else failures
        self._pause = min(num_ranks // MAX_WRITES_PER_SECOND, MAX_PAUSE)
        self._next_write = 0.0
        self._written: Position | None = None
        self._dumped: Position | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check(self) -> None:
        """Write the position if it has changed, and the stacks if the rank is hung."""
        position = self._position.current
        now = self._clock()
        seconds = now - position.time
        is_hung = seconds > self._position.stall_seconds
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if position != self._written and (now >= self._next_write or is_hung):
                process = {"host": socket.gethostname(), "pid": os.getpid()}
                text = json.dumps(position._asdict() | process) + "\n"
                temporary = self._folder / f".rank-{self._rank}"
                write_atomically(self._file, text, temporary, durable=False)
                self._written = position
                self._next_write = now + self._pause
            if is_hung and position.phase in ("step", "validate") and position != self._dumped:
                self._dumped = position
                self._dump(position, seconds)
        except OSError as error:
            self._failures.record(error.filename or self._file, error)

    def close(self) -> None:
        """Write the last position and end the thread."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _dump(self, position: Position, seconds: float) -> None:
        stacks = self._folder / f"stacks-rank-{self._rank}.txt"
        with stacks.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        if self._trace is not None:
            path, content = self._trace
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content())
        logger.error(
            f"Step {position.step}, micro-batch {position.micro_batch}, has taken {seconds:.0f} s so far: {stacks}"
        )

    def _run(self) -> None:
        self.check()
        while not self._end.wait(INTERVAL):
            self.check()
        self.check()


def kill_hung_peers(
    attempt_folder: Path,
    stall_seconds: float,
    rank: int,
    num_ranks: int,
    clock: Callable[[], float] = time.time,
) -> None:
    """Kill the ranks of this launcher whose heartbeat is older than `stall_seconds`.

    For a rank that fails: its hung peers cannot end by themselves, and torchrun waits for them for
    half a minute before it kills them.
    """
    import psutil

    # torchrun numbers the ranks of a node consecutively. Other launchers set neither variable.
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    own_process = (socket.gethostname(), os.getppid())
    for peer in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))):
        file = run_directory.heartbeat_file(attempt_folder, peer)
        with suppress(OSError, ValueError, psutil.Error):  # the peer has ended
            heartbeat = json.loads(file.read_text(encoding="utf-8"))
            pid = heartbeat["pid"]
            seconds = clock() - heartbeat["time"]
            is_peer = (
                pid != os.getpid()
                and (heartbeat["host"], psutil.Process(pid).ppid()) == own_process
            )
            if is_peer and seconds > stall_seconds:
                logger.error(f"{file.stem} has hung for {seconds:.0f} s: killing it")
                os.kill(pid, signal.SIGKILL)
