"""Read the state and the newest numbers of a run from the ends of its files."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torchtitan_like.report.files import read_run_config, step_seconds
from torchtitan_like.report.goodput import STALL_FACTOR
from torchtitan_like.report.recorded import as_time
from torchtitan_like.report.status import SILENT_SECONDS, format_clock, total_steps
from torchtitan_like.report.tolerant import Row, read_tail
from torchtitan_like.report.web.boundary import Boundary
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.run_directory import (
    CONFIG,
    ERRORS,
    EXIT,
    FIRST_ERROR,
    METRICS,
    error_file,
    heartbeat_file,
    newest_attempt,
    read_exit,
    read_first_error,
)

TAIL_BYTES = 2**15  # of metrics.jsonl
MAX_RANKS = 16  # whose heartbeats are read
LOST_SECONDS = 3600.0  # without a sign, after which a run counts as stopped

RUNNING = "running"
STOPPED = "stopped"
HUNG = "hung"
UNREADABLE = "unreadable"
STATES = (RUNNING, STOPPED, HUNG, UNREADABLE)


@dataclass(frozen=True)
class RunStatus:
    """The newest numbers of a run; None where they are unknown.

    state: one of `STATES`. detail: why it stopped or hangs, or what it is doing. updated: Unix time
    of the newest row. tps: tokens per second and device. mfu: in percent of the peak.
    """

    state: str
    detail: str
    step: int | None = None
    total_steps: int | None = None
    tokens: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tps: float | None = None
    mfu: float | None = None
    updated: float | None = None
    seconds_left: float | None = None


@dataclass
class _Cached:
    """A value that was read from a file, and the file's identity at that time."""

    identity: tuple[int, ...] | None = None
    value: Any = None


@dataclass
class StatusReader:
    """Reads the status of one run again and again. Unchanged files are not read again."""

    run: Path
    boundary: Boundary
    _config: _Cached = field(default_factory=_Cached)
    _rows: _Cached = field(default_factory=_Cached)

    def read(self, now: float) -> RunStatus:
        """Return the status. now: Unix time."""
        try:
            self.boundary.require(self.run)
            total = self._read_config()
            rows = self._read_rows()
            attempt = newest_attempt(self.run)
            beats = self._read_heartbeats(attempt)
            state, detail = self._find_state(attempt, beats, rows, now)
        except (OSError, ValueError) as error:
            return RunStatus(UNREADABLE, str(error))
        last = rows[-1] if rows else {}
        seconds = _typical_seconds(rows)
        step = last.get("step")
        left = None
        if state == RUNNING and None not in (total, step, seconds):
            left = max(0, total - step) * seconds
        return RunStatus(
            state,
            detail,
            step=step,
            total_steps=total,
            tokens=_newest(rows[-1:], "n_tokens_seen"),
            loss=_newest(rows[-1:], "loss"),
            grad_norm=_newest(rows[-1:], "grad_norm"),
            tps=_newest(rows, "tps"),
            mfu=_newest(rows, "mfu"),
            updated=_newest_time(rows),
            seconds_left=left,
        )

    def _read_config(self) -> Any:
        identity = self._identify(CONFIG)
        if identity is None or identity != self._config.identity:
            self._config = _Cached(identity, total_steps(read_run_config(self.run)))
        return self._config.value

    def _read_rows(self) -> list[Row]:
        identity = self._identify(METRICS)
        if identity is None or identity != self._rows.identity:
            self._rows = _Cached(identity, read_tail(self.run / METRICS, TAIL_BYTES))
        rows: list[Row] = self._rows.value
        return rows

    def _identify(self, name: str) -> tuple[int, ...] | None:
        file = self.run / name
        self.boundary.require(file)
        try:
            stats = file.stat()
        except FileNotFoundError:
            return None
        return stats.st_dev, stats.st_ino, stats.st_size, stats.st_mtime_ns

    def _read_heartbeats(self, attempt: Path | None) -> dict[int, Row]:
        """Read the heartbeats of the first ranks. Skips malformed and missing files."""
        beats = {}
        if attempt is None or (self.run / EXIT).exists():
            return {}
        for rank in range(MAX_RANKS):
            file = heartbeat_file(attempt, rank)
            self.boundary.require(file)
            try:
                beats[rank] = dict(read_json(file))
            except FileNotFoundError:
                break
            except (OSError, ValueError, TypeError):
                continue
        return beats

    def _find_state(
        self, attempt: Path | None, beats: dict[int, Row], rows: Sequence[Row], now: float
    ) -> tuple[str, str]:
        """Return the state and its detail."""
        self.boundary.require(self.run / EXIT)
        try:
            end = read_exit(self.run)
        except FileNotFoundError:
            pass
        else:
            where = "before the first step" if end.step is None else f"at step {end.step:,}"
            lost = _ranks_without_error(attempt) if end.code else ""
            return STOPPED, f"{end.reason} (code {end.code}) {where}{lost}"
        dead = [rank for rank, beat in beats.items() if _has_ended(beat)]
        if attempt is not None:
            self.boundary.require(attempt / ERRORS / FIRST_ERROR)
            error = read_first_error(attempt)
            if error is not None:
                return STOPPED, f"{_describe(error)}{_ranks_without_error(attempt)}"
        if dead and len(dead) == len(beats):
            return (
                STOPPED,
                f"killed: the processes of rank {_join(dead)} are gone, without an error",
            )
        if dead:
            return HUNG, f"the process of rank {_join(dead)} is gone, without an error"
        newest = _newest_time(rows)
        signs = [] if newest is None else [newest]
        signs += [time for b in beats.values() if (time := as_time(b.get("time"))) is not None]
        if not signs and attempt is not None:
            signs.append(attempt.stat().st_mtime)
        silence = now - max(signs, default=0.0)
        if silence > LOST_SECONDS:
            return STOPPED, "no end recorded: killed with its machine, or hung"
        position = _position(beats)
        if silence > max(SILENT_SECONDS, STALL_FACTOR * (_typical_seconds(rows) or 0.0)):
            return HUNG, f"no progress for {format_clock(silence)}{position and f', {position}'}"
        return RUNNING, position


def _typical_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median seconds of the newest steps; None without two of them."""
    timed = [row for row in rows if as_time(row.get("time")) is not None]
    seconds = sorted(step_seconds(timed))
    return max(0.0, seconds[len(seconds) // 2]) if seconds else None


def _newest(rows: Sequence[Row], key: str) -> float | None:
    """Return the last value of a key that is a number, which may be NaN."""
    values = (row.get(key) for row in reversed(rows))
    return next((float(value) for value in values if isinstance(value, (int, float))), None)


def _newest_time(rows: Sequence[Row]) -> float | None:
    """Return the time of the newest row that has one."""
    times = (as_time(row.get("time")) for row in reversed(rows))
    return next((time for time in times if time is not None), None)


def _position(beats: dict[int, Row]) -> str:
    """Return the phase of the rank that is behind the others."""
    if not beats:
        return ""
    beat = min(beats.values(), key=lambda beat: as_time(beat.get("step")) or 0.0)
    step = as_time(beat.get("step"))
    return f"{beat.get('phase')} at step {step:,.0f}" if step else str(beat.get("phase"))


def _has_ended(beat: Row) -> bool:
    """Return True if the process of a heartbeat was on this machine and is gone before its end."""
    pid, time = beat.get("pid"), as_time(beat.get("time"))
    if beat.get("host") != socket.gethostname() or beat.get("phase") == "end":
        return False
    if not isinstance(pid, int) or time is None:
        return False
    try:
        process = psutil.Process(pid)
        # The number may have been given to a new process.
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > time + 1)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True
    except psutil.Error:
        return False


def _describe(error: Row) -> str:
    """Return rank, phase, step and the last line of the traceback of an error record."""
    lines = str(error.get("traceback", "")).strip().splitlines()
    text = f": {lines[-1]}" if lines else ""
    return (
        f"error on rank {error.get('rank')} in phase {error.get('phase')} at step "
        f"{error.get('step')}{text}"
    )


def _ranks_without_error(attempt: Path | None) -> str:
    """Return a text about the ranks that left no error although others did; "" without any."""
    if attempt is None or not os.path.isdir(attempt / ERRORS):
        return ""
    silent = [
        rank
        for rank in range(MAX_RANKS)
        if heartbeat_file(attempt, rank).exists() and not error_file(attempt, rank).exists()
    ]
    return f"; no error of rank {_join(silent)}: killed, or it hung" if silent else ""


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
