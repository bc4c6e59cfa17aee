"""The position of a rank in its run: step, micro-batch and phase."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Position(NamedTuple):
    """A phase of a step: "start", "join", "step", "validate", "save" or "end".

    time: Unix time of its start. "join": the rank waits for other replica groups, which is not a hang.
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
