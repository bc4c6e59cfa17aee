"""Where each rank is, in a file of its own: for those who look from outside at a run that stands still."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from torchtitan_like.util import run_directory
from torchtitan_like.util.files import WriteFailures, write_atomically

logger = logging.getLogger()

INTERVAL = 5.0  # seconds between two looks
# What a shared file system has to take of all ranks together: so many writes in a second; LONGEST seconds without one.
MOST_WRITES, LONGEST = 500, 30


class Beat(NamedTuple):
    """The newest place of a rank: time is that of its arrival there, in seconds since 1970."""

    phase: str
    step: int
    micro_batch: int
    time: float


class Heartbeat:
    """Writes ``folder/heartbeat/rank-<r>.json`` from a thread, whenever the rank has come to another place.

    A rank that stays in one place of a step, or at one batch of a validation, for longer than ``limit`` seconds has the stacks
    of all its threads written beside it (``stacks-rank-<r>.txt``), and the collectives that it has called into ``trace`` (file,
    what goes into it), once for each place: before the time-out of a collective ends the process. A file that cannot be
    written is noted in `failures`.
    """

    newest: ClassVar[Heartbeat | None] = None  # of this process: where it is when an error ends it

    def __init__(
        self,
        folder: Path,
        rank: int,
        clock: Callable[[], float] = time.time,
        *,
        num_ranks: int = 1,
        trace: tuple[Path, Callable[[], bytes]] | None = None,
        failures: WriteFailures | None = None,
    ) -> None:
        self.limit = float("inf")
        Heartbeat.newest = self
        self.folder, self.at = folder, Beat("start", 0, 0, clock())
        self._trace = trace
        self._folder, self._rank, self._num_ranks, self._clock = folder / run_directory.HEARTBEATS, rank, num_ranks, clock
        self._written: Beat | None = None
        self._pause, self._next_write = min(num_ranks // MOST_WRITES, LONGEST), 0.0
        self._dumped: Beat | None = None
        self._failures = WriteFailures() if failures is None else failures
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self, limit: float) -> None:
        self.limit = limit
        self._thread.start()

    def beat(self, phase: str, step: int, micro_batch: int = 0) -> None:
        """The rank is here now. Costs less than a microsecond."""
        self.at = Beat(phase, step, micro_batch, self._clock())

    def place(self) -> tuple[int, int]:
        """Step and micro-batch."""
        return self.at.step, self.at.micro_batch

    def look(self) -> None:
        """Write what there is to write."""
        beat, now = self.at, self._clock()
        silent = now - beat.time
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if beat != self._written and (now >= self._next_write or silent > self.limit):
                who = {"host": socket.gethostname(), "pid": os.getpid()}
                write_atomically(
                    self._folder / f"rank-{self._rank}.json",
                    json.dumps(beat._asdict() | who) + "\n",
                    self._folder / f".rank-{self._rank}",
                    durable=False,
                )
                self._written, self._next_write = beat, now + self._pause
            if beat.phase in ("step", "validate") and silent > self.limit and beat != self._dumped:
                self._dumped = beat
                stacks = self._folder / f"stacks-rank-{self._rank}.txt"
                with stacks.open("w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file)
                if self._trace is not None:
                    self._trace[0].parent.mkdir(parents=True, exist_ok=True)
                    self._trace[0].write_bytes(self._trace[1]())
                logger.error(
                    f"Step {beat.step}, micro-batch {beat.micro_batch}, has taken {silent:.0f} s so far: {stacks}"
                )
        except OSError as error:
            self._failures.note(error.filename or self._folder / f"rank-{self._rank}.json", error)

    def kill_stuck_peers(self) -> None:
        """For a rank that an error ends: ranks beside it that have stood still for longer than `limit` cannot do anything about
        it, and torchrun would wait for them for half a minute before it does the same.
        """
        import psutil

        # As torchrun numbers them; a launcher that does not tell which ranks are beside this one has any of them there.
        first = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))
        for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self._num_ranks))):
            file = self._folder / f"rank-{rank}.json"
            with suppress(OSError, ValueError, psutil.Error):  # it has ended
                at = json.loads(file.read_text(encoding="utf-8"))
                silent, mine = self._clock() - at["time"], (socket.gethostname(), os.getppid())
                is_beside = (at["host"], psutil.Process(at["pid"]).ppid()) == mine and at["pid"] != os.getpid()
                if is_beside and silent > self.limit:
                    logger.error(f"{file.stem} has stood still for {silent:.0f} s, and is killed")
                    os.kill(at["pid"], signal.SIGKILL)

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        self.look()
        while not self._end.wait(INTERVAL):
            self.look()
        self.look()
