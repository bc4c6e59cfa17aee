"""Find the state of a run from its files: running, hung or stopped, and why.

`titan run ls`, `titan run watch` and `titan run report` show the same state.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.files import Row, median_step_seconds
from torchtitan_like.util.run_directory import (
    CONFIG,
    HEARTBEATS,
    files_of_ranks,
    newest_attempt,
    ranks_with_errors,
    read_exit,
    read_first_error,
    read_heartbeats,
)
from torchtitan_like.util.units import format_clock

SILENT_SECONDS = 60.0  # without a sign, after which a run hangs unless its steps are longer
STALL_FACTOR = 5.0  # a longer step than this many typical steps is a stall
LOST_SECONDS = 3600.0  # without a sign, after which a run counts as stopped
MAX_RANKS_READ = 16  # heartbeats; all ranks stop soon after one of them
MAX_RANKS_SHOWN = 8

RUNNING = "running"
HUNG = "hung"
STOPPED = "stopped"
UNREADABLE = "unreadable"

# Reasons why a run has stopped, in addition to those in exit.json.
ERROR = "error"
KILLED = "killed"
LOST = "lost"


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    name: `RUNNING`, `HUNG`, `STOPPED` or `UNREADABLE`. reason: of a stopped run, one word: that of
    exit.json, `ERROR`, `KILLED`, or `LOST` for an hour without a sign. detail: why it stopped or
    hangs, or the phase and step that it is in. updated: Unix time of the newest row or heartbeat.
    """

    name: str
    reason: str = ""
    detail: str = ""
    updated: float | None = None

    @property
    def label(self) -> str:
        """The state and the reason."""
        return f"{self.name}: {self.reason}" if self.reason else self.name

    @property
    def line(self) -> str:
        """The state and the detail."""
        return f"{self.name}: {self.detail}" if self.detail else self.label


def find_state(run: Path, rows: Sequence[Row], now: float) -> RunState:
    """Return the state of a run directory.

    rows: the newest rows of metrics.jsonl, with step and time. now: Unix time.
    """
    try:
        return _find_state(run, rows, now)
    except (OSError, ValueError) as error:
        return RunState(UNREADABLE, detail=str(error))


def _find_state(run: Path, rows: Sequence[Row], now: float) -> RunState:
    attempt = newest_attempt(run)
    try:
        end = read_exit(run)
    except FileNotFoundError:
        pass
    else:
        where = "before the first step" if end.step is None else f"at step {end.step:,}"
        silent = _ranks_without_error(attempt) if end.code else ""
        detail = f"{end.reason} (code {end.code}) {where}{silent}"
        return RunState(STOPPED, end.reason, detail, _last_sign(run, attempt, {}, rows))
    beats = {} if attempt is None else read_heartbeats(attempt, MAX_RANKS_READ)
    updated = _last_sign(run, attempt, beats, rows)
    error = None if attempt is None else read_first_error(attempt)
    if error is not None:
        detail = f"{_describe_error(error)}{_ranks_without_error(attempt)}"
        return RunState(STOPPED, ERROR, detail, updated)
    dead = [rank for rank, beat in beats.items() if _is_process_gone(beat)]
    if dead and len(dead) == len(beats):
        detail = f"killed: the processes of rank {format_ranks(dead)} are gone, without an error"
        return RunState(STOPPED, KILLED, detail, updated)
    if dead:
        detail = f"the process of rank {format_ranks(dead)} is gone, without an error"
        return RunState(HUNG, "", detail, updated)
    silence = now - updated
    if silence > LOST_SECONDS:
        detail = "no end recorded: killed with its machine, or hung"
        return RunState(STOPPED, LOST, detail, updated)
    position = _position(beats)
    if silence > max(SILENT_SECONDS, STALL_FACTOR * (median_step_seconds(rows) or 0.0)):
        detail = f"no progress for {format_clock(silence)}{position and f', {position}'}"
        return RunState(HUNG, "", detail, updated)
    return RunState(RUNNING, "", position, updated)


def _last_sign(
    run: Path, attempt: Path | None, beats: dict[int, Row], rows: Sequence[Row]
) -> float:
    """Return the time of the newest row or heartbeat; before them, of the start of the attempt."""
    signs = [row["time"] for row in rows[-1:]]
    signs += [beat["time"] for beat in beats.values() if beat.get("time") is not None]
    if not signs:
        start = run / CONFIG if attempt is None else attempt
        signs.append(start.stat().st_mtime)
    return float(max(signs))


def _position(beats: dict[int, Row]) -> str:
    """Return the phase and step of the rank that is behind the others."""
    if not beats:
        return ""
    beat = min(beats.values(), key=lambda beat: beat.get("step") or 0)
    step = beat.get("step")
    return f"{beat.get('phase')} at step {step:,}" if step else str(beat.get("phase"))


def _is_process_gone(beat: dict[str, Any]) -> bool:
    """Return True if the process of a heartbeat was on this machine and is gone before its end."""
    pid, time = beat.get("pid"), beat.get("time")
    if beat.get("host") != socket.gethostname() or beat.get("phase") == "end":
        return False
    if not isinstance(pid, int) or time is None:
        return False
    import psutil

    try:
        process = psutil.Process(pid)
        # The number may have been given to a new process.
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > time + 1)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True
    except psutil.Error:
        return False


def _describe_error(error: Row) -> str:
    """Return rank, phase, step and the last line of the traceback of an error record."""
    lines = str(error.get("traceback", "")).strip().splitlines()
    text = f": {lines[-1]}" if lines else ""
    return (
        f"error on rank {error.get('rank')} in phase {error.get('phase')} at step "
        f"{error.get('step')}{text}"
    )


def _ranks_without_error(attempt: Path | None) -> str:
    """Return a text about the ranks that left no error although others did; "" without any."""
    failed = set() if attempt is None else ranks_with_errors(attempt)
    if attempt is None or not failed:
        return ""
    silent = sorted(files_of_ranks(attempt / HEARTBEATS).keys() - failed)
    return f"; no error of rank {format_ranks(silent)}: killed, or it hung" if silent else ""


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the first ranks as text."""
    shown = [str(rank) for rank in ranks]
    more = " ..." if len(shown) > MAX_RANKS_SHOWN else ""
    return ", ".join(shown[:MAX_RANKS_SHOWN]) + more
