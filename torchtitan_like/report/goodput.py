"""Divide the wall time of a run into classes: goodput and what it was lost to.

Every second belongs to exactly one class, and the classes sum to the wall time. The reference page
docs/reference/goodput.md defines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.report.state import STALL_FACTOR

# Class -> its meaning, in the order of the tables.
CLASSES = {
    "start_up": "start of an attempt until its first step is done",
    "training": "steps that advanced the run",
    "checkpoint": "steps delayed by a checkpoint",
    "validation": "validation",
    "stall": "steps of more than 5 times the typical step, and hangs before an error",
    "skipped": "steps without an update of the weights",
    "repeated": "steps whose results were discarded by a restart",
    "shutdown": "last step until the end of an attempt that stopped by itself",
    "stopped": "between two attempts",
}
START_ERROR = 1.5  # seconds; a process's time of start follows from a boot time in whole seconds

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """An activity between two times, in seconds since 1970."""

    start: float
    end: float


@dataclass(frozen=True)
class AttemptTimes:
    """The times of one attempt, in seconds since 1970.

    steps, times: int64 and float64 (rows,), number and end of each recorded step, in order.
    classes: for each of them "training", "skipped" or "repeated".
    last_sign: last change of position of any rank, in its heartbeat.
    has_stopped: the ranks agreed to stop, so no finished step was lost.
    """

    start: float
    end: float
    steps: NDArray[np.int64]
    times: Floats
    classes: Sequence[str]
    saves: Sequence[Window] = ()
    validations: Sequence[Window] = ()
    last_sign: float = -math.inf
    has_stopped: bool = False


@dataclass
class Goodput:
    """Seconds of each class. attempts: the same for each attempt, with the time before its start."""

    seconds: dict[str, float]
    attempts: list[dict[str, float]] = field(default_factory=list)
    num_clock_jumps: int = 0

    @property
    def wall(self) -> float:
        """Seconds from the start of the first attempt to the end of the last."""
        return math.fsum(self.seconds.values())

    @property
    def share(self) -> float:
        """Goodput: the part of the wall time in class "training"; NaN without wall time."""
        return self.seconds["training"] / self.wall if self.wall > 0 else math.nan


def measure_goodput(attempts: Sequence[AttemptTimes]) -> Goodput:
    """Divide the time of the attempts, oldest first, into classes.

    A time before an earlier one, of a node with another clock, counts as equal to the earlier one.
    """
    goodput = Goodput(_no_seconds())
    typical = _typical_step(attempts)
    now = attempts[0].start if attempts else 0.0
    for attempt in attempts:
        seconds = _no_seconds()
        start = max(now, attempt.start)
        goodput.num_clock_jumps += (attempt.start < now - START_ERROR) + int(
            np.count_nonzero(np.diff(attempt.times, prepend=attempt.start) < 0)
        )
        seconds["stopped"] = start - now
        now = _divide_attempt(attempt, start, typical, seconds)
        goodput.attempts.append(seconds)
    goodput.seconds = {
        name: math.fsum(seconds[name] for seconds in goodput.attempts) for name in CLASSES
    }
    return goodput


def _divide_attempt(
    attempt: AttemptTimes, start: float, typical: float, seconds: dict[str, float]
) -> float:
    """Add the time of an attempt to `seconds`, and return its end."""
    times = np.maximum.accumulate(np.concatenate([[start], attempt.times]))
    if not len(attempt.times):
        end = max(start, attempt.end)
        seconds["start_up"] += end - start
        return end
    seconds["start_up"] += times[1] - times[0]
    steps = _Intervals(attempt, times[1:])
    own_typical = steps.typical()
    per_step = typical if math.isnan(own_typical) else own_typical
    expected = per_step * steps.num_steps
    validation = np.minimum(steps.validation, steps.lengths)
    left = steps.lengths - validation
    checkpoint = np.minimum(steps.saves, np.maximum(0.0, left - expected))
    left = left - checkpoint
    is_stalled = (left > STALL_FACTOR * expected) & (expected > 0)
    stall = np.where(is_stalled, left - expected, 0.0)
    work = left - stall
    for name, part in (("validation", validation), ("checkpoint", checkpoint), ("stall", stall)):
        seconds[name] += math.fsum(part)
    classes = np.array(attempt.classes[1:])
    for name in ("training", "skipped", "repeated"):
        seconds[name] += math.fsum(work[classes == name])
    return _divide_tail(attempt, times[-1], seconds)


def _divide_tail(attempt: AttemptTimes, last_step: float, seconds: dict[str, float]) -> float:
    """Add the time after the last recorded step to `seconds`, and return its end."""
    end = max(last_step, attempt.end)
    edges = np.array([last_step, end])
    left = end - last_step
    validation = min(left, _overlap(attempt.validations, edges)[0])
    checkpoint = min(left - validation, _overlap(attempt.saves, edges)[0])
    left = left - validation - checkpoint
    seconds["validation"] += validation
    seconds["checkpoint"] += checkpoint
    if attempt.has_stopped:
        seconds["shutdown"] += left
        return end
    # Steps after the last written row are lost. Then the ranks hung until the error or the kill.
    hung = min(left, max(0.0, end - max(attempt.last_sign, last_step)))
    seconds["stall"] += hung
    seconds["repeated"] += left - hung
    return end


class _Intervals:
    """The times between the recorded steps of an attempt. All arrays are float64 (rows - 1,).

    edges: float64 (rows,), the ends of the steps, which never decrease.
    """

    def __init__(self, attempt: AttemptTimes, edges: Floats) -> None:
        self.lengths = np.diff(edges)
        self.num_steps = np.maximum(1, np.diff(attempt.steps))  # lost rows make it more than one
        self.validation = _overlap(attempt.validations, edges)
        self.saves = _overlap(attempt.saves, edges)

    def undisturbed(self) -> Floats:
        """Return the seconds of each step without a checkpoint or a validation."""
        is_clean = (self.saves == 0) & (self.validation == 0)
        seconds: Floats = self.lengths[is_clean] / self.num_steps[is_clean]
        return seconds

    def typical(self) -> float:
        """Return the median of `undisturbed`; NaN without any."""
        seconds = self.undisturbed()
        return float(np.median(seconds)) if len(seconds) else math.nan


def _typical_step(attempts: Sequence[AttemptTimes]) -> float:
    """Return the median of the undisturbed steps of all attempts, or else of all steps; or else 0."""
    intervals = [
        _Intervals(attempt, np.maximum.accumulate(attempt.times))
        for attempt in attempts
        if len(attempt.times) > 1
    ]
    for parts in (
        [steps.undisturbed() for steps in intervals],
        [steps.lengths / steps.num_steps for steps in intervals],
    ):
        seconds = np.concatenate([np.empty(0), *parts])
        if len(seconds):
            return float(np.median(seconds))
    return 0.0


def _overlap(windows: Sequence[Window], edges: Floats) -> Floats:
    """Return the seconds of each interval between two edges that lie in a window."""
    seconds = np.zeros(len(edges) - 1)
    for start, end in _merge(windows):
        first = max(0, int(np.searchsorted(edges, start, "right")) - 1)
        last = min(len(seconds), int(np.searchsorted(edges, end, "left")))
        part = np.minimum(edges[first + 1 : last + 1], end) - np.maximum(edges[first:last], start)
        seconds[first:last] += np.maximum(0.0, part)
    return seconds


def _merge(windows: Sequence[Window]) -> Iterator[Window]:
    """Yield the union of windows as windows that do not overlap."""
    merged: Window | None = None
    for window in sorted(windows):
        if merged is not None and window.start <= merged.end:
            merged = Window(merged.start, max(merged.end, window.end))
            continue
        if merged is not None:
            yield merged
        merged = window
    if merged is not None:
        yield merged


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(CLASSES, 0.0)
