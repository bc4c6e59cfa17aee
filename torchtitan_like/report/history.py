"""Order what a run has recorded in time: rows by attempt, goodput, and events with their steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.report.columns import Columns, Floats
from torchtitan_like.report.goodput import AttemptTimes, Goodput, Window, measure_goodput
from torchtitan_like.report.recorded import (
    RecordedAttempt,
    RecordedRun,
    read_run,
    rows_as_floats,
)
from torchtitan_like.report.redaction import redact
from torchtitan_like.report.state import STOPPED, summarize_error
from torchtitan_like.report.tolerant import Row, as_time

LAYOUT_SETTINGS = "parallelism."
# Settings that describe how a run was started, not what it computes.
OWN_SETTINGS = ("job.config_file", "job.print_config")

Changes = dict[str, tuple[Any, Any]]


@dataclass
class AttemptHistory:
    """One attempt. first_step, last_step: of its recorded rows, also discarded ones.

    times: of its rows. ended: how it ended, as text. changes: settings that differ from the settings of
    the attempt before it, with both values.
    """

    recorded: RecordedAttempt
    times: AttemptTimes
    seconds: dict[str, float]
    first_step: int | None
    last_step: int | None
    ended: str
    changes: Changes


@dataclass
class History:
    """A run in order. origin: start of the run in seconds since 1970.

    step, time, tokens: float64 (rows,) of metrics.jsonl. attempt_of: int64 (rows,), the number of
    the attempt that wrote each row. events: those recorded and those derived from other files.
    """

    run: RecordedRun
    origin: float
    step: Floats
    time: Floats
    tokens: Floats
    attempt_of: NDArray[np.int64]
    attempts: list[AttemptHistory]
    goodput: Goodput
    events: list[Row]

    def hours(self, times: Floats) -> Floats:
        """Return hours since the start of the run."""
        return (times - self.origin) / 3600

    def tokens_at(self, steps: Floats) -> Floats:
        """Return the tokens of the last row up to each step; 0 before the first row."""
        tokens = np.concatenate([[0.0], self.tokens])
        reached: Floats = tokens[np.searchsorted(np.maximum.accumulate(self.step), steps, "right")]
        return reached


def read_histories(folders: Sequence[Path], *, is_redacted: bool) -> list[History]:
    """Read runs, with names that differ. is_redacted: see `redact`. Raises ValueError."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    if is_redacted:
        runs = [redact(run, f"run {number}") for number, run in enumerate(runs, start=1)]
    return [build_history(run) for run in runs]


def build_history(run: RecordedRun) -> History:
    """Order the rows, attempts and events of a run."""
    recorded = run.attempts or [RecordedAttempt(1)]
    timeline = _Timeline(run, recorded)
    times = [timeline.attempt(index) for index in range(len(recorded))]
    goodput = measure_goodput(times)
    attempts = []
    previous = RecordedAttempt(0)
    for attempt, own_times, seconds in zip(recorded, times, goodput.attempts, strict=True):
        has_rows = len(own_times.steps) > 0
        attempts.append(
            AttemptHistory(
                attempt,
                own_times,
                seconds,
                int(own_times.steps[0]) if has_rows else None,
                int(own_times.steps[-1]) if has_rows else None,
                _describe_end(run, attempt, is_newest=attempt is recorded[-1]),
                diff_settings(previous.config, attempt.config),
            )
        )
        previous = attempt if attempt.config else previous
    numbers = np.array([attempt.number for attempt in recorded], dtype=np.int64)
    history = History(
        run=run,
        origin=timeline.starts[0],
        step=run.metrics.get("step"),
        time=run.metrics.get("time"),
        tokens=run.metrics.get("n_tokens_seen"),
        attempt_of=numbers[timeline.owner],
        attempts=attempts,
        goodput=goodput,
        events=[],
    )
    history.events = _all_events(history)
    return history


def diff_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Return the settings whose values differ, with both; None: absent. {} if one has no config."""
    if not before or not after:
        return {}
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in OWN_SETTINGS
    }


# ---- attempts


class _Timeline:
    """The times of a run's rows and events, divided among its attempts.

    starts: of each attempt. owner: int64 (rows,), the index of the attempt that wrote each row.
    """

    def __init__(self, run: RecordedRun, recorded: Sequence[RecordedAttempt]) -> None:
        self._run = run
        self._recorded = recorded
        self._skipped = run.metrics.get("skipped") > 0
        self.starts = _starts(recorded, run.metrics.get("time"))
        self.owner = self._owners(run.metrics, len(recorded) - 1)

    def attempt(self, index: int) -> AttemptTimes:
        """Return the times of one attempt."""
        attempt, start = self._recorded[index], self.starts[index]
        is_newest = index == len(self._recorded) - 1
        limit = math.inf if is_newest else self.starts[index + 1]
        events = [event for event in self._run.events if event.get("attempt") == attempt.number]
        rows = self._rows(index)
        validations = [
            window
            for window in _windows([*self._run.validation, *self._run.discarded_validation])
            if start <= window.end < limit
        ]
        has_stopped = any(event["event"] == "stop" for event in events)
        ends = [start, *rows.times[-1:].tolist()]
        is_open = is_newest and self._run.state.name != STOPPED
        if has_stopped or not is_open or len(ends) == 1:  # else its next rows are not yet written
            ends += [window.end for window in validations]
            ends += [time for e in events if (time := as_time(e.get("time"))) is not None]
            ends += attempt.error_times
            if not has_stopped and attempt.last_sign is not None:
                ends.append(attempt.last_sign)
        return AttemptTimes(
            start=start,
            end=max(ends),
            steps=rows.steps,
            times=rows.times,
            classes=rows.classes,
            saves=_windows(event for event in events if event["event"] == "save"),
            validations=validations,
            last_sign=-math.inf if attempt.last_sign is None else attempt.last_sign,
            has_stopped=has_stopped,
        )

    def _rows(self, index: int) -> _Rows:
        """Return the rows that an attempt wrote, including rows that a later attempt discarded."""
        is_own = self.owner == index
        names = np.where(self._skipped[is_own], "skipped", "training").tolist()
        parts = [_Rows.of(self._run.metrics, is_own, names)]
        for number, discarded in self._run.discarded.items():
            num_earlier = sum(attempt.number < number for attempt in self._recorded)
            is_own = self._owners(discarded, num_earlier - 1) == index
            parts.append(_Rows.of(discarded, is_own, ["repeated"] * int(is_own.sum())))
        return _Rows.merge(parts)

    def _owners(self, rows: Columns, most: int) -> NDArray[np.int64]:
        """Return the index of the attempt that wrote each row: the last one that started before it.

        Never decreases, because rows are in the order of their steps. most: the largest index.
        """
        times = rows.get("time")
        starts = np.maximum.accumulate(np.array(self.starts))
        owner = np.searchsorted(starts, np.where(np.isfinite(times), times, -math.inf), "right") - 1
        owners: NDArray[np.int64] = np.maximum.accumulate(np.clip(owner, 0, max(0, most)))
        return owners


def _starts(recorded: Sequence[RecordedAttempt], time: Floats) -> list[float]:
    """Return the start of each attempt.

    The first sign of an attempt replaces an unknown start: a row or an event of the first attempt,
    an event of a later one, or else the start of the attempt before it.
    """
    first_row = time[np.isfinite(time)][:1].tolist()
    starts: list[float] = []
    for attempt in recorded:
        signs = [attempt.first_event] if attempt.first_event is not None else []
        signs += starts[-1:] or first_row
        if attempt.start is not None:
            starts.append(attempt.start)
        elif starts:
            starts.append(signs[0])
        else:
            starts.append(min(signs, default=0.0))
    return starts


@dataclass
class _Rows:
    """Rows of one attempt: int64, float64 and str (rows,)."""

    steps: NDArray[np.int64]
    times: Floats
    classes: list[str]

    @classmethod
    def of(cls, columns: Columns, is_own: NDArray[np.bool_], classes: list[str]) -> _Rows:
        """Select rows; those without a time are left out."""
        steps, times = columns.get("step")[is_own], columns.get("time")[is_own]
        has_time = np.isfinite(times)
        kept = [name for name, has in zip(classes, has_time, strict=True) if has]
        return cls(steps[has_time].astype(np.int64), times[has_time], kept)

    @classmethod
    def merge(cls, parts: Sequence[_Rows]) -> _Rows:
        """Return all rows in the order of their steps."""
        steps = np.concatenate([part.steps for part in parts])
        order = np.argsort(steps, kind="stable")
        classes = [name for part in parts for name in part.classes]
        times = np.concatenate([part.times for part in parts])
        return cls(steps[order], times[order], [classes[index] for index in order])


def _windows(rows: Iterable[Row]) -> list[Window]:
    """Return the times of rows that are written at the end of something of `seconds`."""
    windows = []
    for row in rows:
        end, seconds = as_time(row.get("time")), as_time(row.get("seconds"))
        if end is not None and seconds is not None:
            windows.append(Window(end - max(0.0, seconds), end))
    return windows


def _describe_end(run: RecordedRun, attempt: RecordedAttempt, *, is_newest: bool) -> str:
    stops = [
        event
        for event in run.events
        if event["event"] == "stop" and event.get("attempt") == attempt.number
    ]
    if stops:
        stop = stops[-1]
        return f"{stop.get('reason')} ({stop.get('cause')}), code {stop.get('code')}"
    if is_newest:
        return run.state.line
    if attempt.error is not None:
        return summarize_error(attempt.error)
    return "killed, or ended before training"


# ---- events


def _all_events(history: History) -> list[Row]:
    """Return the recorded events, and events that other files imply, by step and time."""
    events = [*history.run.events, *_skipped_steps(history), *_resumes(history)]
    return sorted(
        events,
        key=lambda event: (as_time(event.get("time")) or 0.0, as_time(event.get("step")) or 0.0),
    )


def _skipped_steps(history: History) -> Iterable[Row]:
    metrics = history.run.metrics
    loss, norm = metrics.get("loss"), metrics.get("grad_norm")
    for index in np.flatnonzero(metrics.get("skipped") > 0):
        yield {
            "event": "skipped step",
            "time": float(history.time[index]),
            "attempt": int(history.attempt_of[index]),
            "step": int(history.step[index]),
            "loss": float(loss[index]),
            "grad_norm": float(norm[index]),
        }


def _resumes(history: History) -> Iterable[Row]:
    """Yield an event for each later attempt that trained, and one if its settings changed."""
    previous: AttemptHistory | None = None
    for attempt in history.attempts:
        if attempt.first_step is None:
            continue
        recorded = attempt.recorded
        if previous is not None:
            base = {
                "time": attempt.times.start,
                "attempt": recorded.number,
                "step": attempt.first_step - 1,
            }
            changes = diff_settings(previous.recorded.config, recorded.config)
            layout = {k: v for k, v in changes.items() if k.startswith(LAYOUT_SETTINGS)}
            ranks = previous.recorded.num_ranks, recorded.num_ranks
            if None not in ranks and ranks[0] != ranks[1]:
                layout["ranks"] = ranks
            kind = "resume on another layout" if layout else "resume"
            yield {"event": kind, **base, **_as_fields(layout)}
            others = {k: v for k, v in changes.items() if k not in layout}
            if others:
                yield {"event": "config change", **base, **_as_fields(others)}
        previous = attempt


def _as_fields(changes: Changes) -> dict[str, str]:
    return {key: f"{before} -> {after}" for key, (before, after) in changes.items()}


# ---- validation


def validation_sets(run: RecordedRun) -> dict[str, list[Row]]:
    """Return the validation rows by dataset; "" for a run with one."""
    sets: dict[str, list[Row]] = {}
    for row in run.validation:
        sets.setdefault(str(row.get("set", "")), []).append(row)
    return sets


def validation_loss(rows: Iterable[Row]) -> tuple[Floats, Floats]:
    """Return step and loss of validation rows, float64 (rows,) each."""
    rows = list(rows)
    return rows_as_floats(rows, "step"), rows_as_floats(rows, "loss")
