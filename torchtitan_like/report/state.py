"""Find the state of a run from its files: running, hung or stopped, and why.

`titan run ls`, `titan run watch`, `titan run report`, the last lines of `titan train` and the
programs of Slurm all show this state.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.tolerant import Row, newest_events, newest_metrics, read_run_config
from torchtitan_like.util.exit_codes import REPEATABLE, ExitCode
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    BAD_STEPS,
    EVENTS,
    EXIT,
    HEARTBEATS,
    METRICS,
    RunEnd,
    SwitchPaths,
    attempt_folder,
    earliest_error,
    files_of_ranks,
    newest_attempt,
    ranks_with_errors,
    read_exit,
    read_heartbeats,
    step_number,
    switch_paths,
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
    end: content of exit.json. advice: what to do next, or "". silent_after: seconds without a sign
    after which the run hangs.
    """

    name: str
    reason: str = ""
    detail: str = ""
    updated: float | None = None
    end: RunEnd | None = None
    advice: str = ""
    silent_after: float = SILENT_SECONDS

    @property
    def label(self) -> str:
        """The state and the reason."""
        return f"{self.name}: {self.reason}" if self.reason else self.name

    @property
    def line(self) -> str:
        """The state and the detail."""
        return f"{self.name}: {self.detail}" if self.detail else self.label

    @property
    def tone(self) -> str:
        """How a view colors the state: "running", "done", "paused" or "failed"."""
        if self.name == RUNNING:
            return "running"
        if self.reason == ExitCode.DONE.reason:
            return "done"
        return "paused" if self.end is not None and self.end.code in REPEATABLE else "failed"


def is_run(folder: Path) -> bool:
    """Return True if a run has written into the folder."""
    return any((folder / name).exists() for name in (METRICS, EVENTS, ATTEMPTS, EXIT))


def require_run(folder: Path) -> None:
    """Raise ValueError if `folder` is not the folder of a run."""
    if not is_run(folder):
        raise ValueError(
            f"{folder} is not the folder of a run: it has none of {METRICS}, {EVENTS}, {ATTEMPTS} "
            f"and {EXIT}. Expected a job.dump_folder. Correct the path."
        )


def switch_files(run: Path) -> tuple[SwitchPaths, dict[str, Any]]:
    """Return the paths of a run's switch files, and its configuration. Raises ValueError."""
    from torchtitan_like.config.sections_run import Resilience  # pydantic is slow to import

    require_run(run)
    config = read_run_config(run)
    defaults = Resilience()
    section = config.get("resilience", {})
    paths = switch_paths(
        run,
        str(Path(section.get("kill_switch_path", defaults.kill_switch_path)).expanduser()),
        str(Path(section.get("save_switch_path", defaults.save_switch_path)).expanduser()),
    )
    return paths, config


def find_state(run: Path, now: float) -> RunState:
    """Return the state of a run directory. now: Unix time."""
    try:
        return _find_state(run, now)
    except (OSError, ValueError) as error:
        return RunState(UNREADABLE, detail=str(error))


def _find_state(run: Path, now: float) -> RunState:
    rows, _ = newest_metrics(run)
    attempt = newest_attempt(run)
    beats = {} if attempt is None else read_heartbeats(attempt, MAX_RANKS_READ)
    updated = _last_sign(run, attempt, beats, rows)
    with suppress(FileNotFoundError):
        end = read_exit(run)
        silent = _describe_silent_ranks(attempt) if end.code else ""
        detail = f"{end}{_cause(run, end)}{silent}"
        advice = _advice(run, attempt, end)
        return RunState(STOPPED, end.reason, detail, updated, end, advice)
    error = None if attempt is None else earliest_error(attempt)
    # A start that failed before it had a number.
    error = earliest_error(attempt_folder(run, 0), since=updated) or error
    if error is not None:
        detail = f"{summarize_error(error)}{_describe_silent_ranks(attempt)}"
        return RunState(STOPPED, ERROR, detail, updated)
    dead = [rank for rank, beat in beats.items() if _is_process_gone(beat)]
    if dead and len(dead) == len(beats):
        detail = f"killed: the processes of rank {format_ranks(dead)} are gone, without an error"
        return RunState(STOPPED, KILLED, detail, updated)
    silent_after = max(SILENT_SECONDS, STALL_FACTOR * (median_step_seconds(rows) or 0.0))
    if dead:
        detail = f"the process of rank {format_ranks(dead)} is gone, without an error"
        return RunState(HUNG, "", detail, updated, silent_after=silent_after)
    silence = now - updated
    if silence > LOST_SECONDS:
        detail = "lost: no sign for an hour, killed with its machine or hung"
        return RunState(STOPPED, LOST, detail, updated)
    position = _position(beats)
    if silence > silent_after:
        detail = f"no progress for {format_clock(silence)}{position and f', {position}'}"
        return RunState(HUNG, "", detail, updated, silent_after=silent_after)
    return RunState(RUNNING, "", position, updated, silent_after=silent_after)


def step_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of each step whose previous step has a row too."""
    pairs = zip(rows, rows[1:], strict=False)
    return [b["time"] - a["time"] for a, b in pairs if b["step"] == a["step"] + 1]


def median_step_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median of `step_seconds`; None if no two rows are neighbors."""
    seconds = sorted(step_seconds(rows))
    return seconds[len(seconds) // 2] if seconds else None


def _last_sign(
    run: Path, attempt: Path | None, beats: Mapping[int, Row], rows: Sequence[Row]
) -> float:
    """Return the time of the newest row or heartbeat; before heartbeats, also of the start."""
    signs = [row["time"] for row in rows[-1:]]
    signs += [beat["time"] for beat in beats.values() if beat.get("time") is not None]
    if not beats and attempt is not None:
        signs.append(attempt.stat().st_mtime)
    return float(max(signs)) if signs else run.stat().st_mtime


def _cause(run: Path, end: RunEnd) -> str:
    """Return a text with the cause in the event of this end; "" if the reason is the cause."""
    if end.code == ExitCode.BAD_NUMBERS:
        return ": the next step has a non-finite loss or gradient"
    stop = newest_stop(run)
    cause = stop.get("cause") if stop.get("code") == end.code else None
    if not isinstance(cause, str) or cause in (end.reason, "last_step"):
        return ""
    return f": {cause.replace('_', ' ')}"


def newest_stop(run: Path) -> Row:
    """Return the newest stop event of a run; empty if there is none."""
    events, _ = newest_events(run)
    return next((event for event in reversed(events) if event["event"] == "stop"), {})


def numbers_of_ranks(run: Path) -> set[int]:
    """Return how many ranks the attempts of a run had, of those in the newest events."""
    events, _ = newest_events(run)
    numbers = {event.get("num_ranks") for event in events if event["event"] == "start"}
    return {number for number in numbers if isinstance(number, int)}


def _advice(run: Path, attempt: Path | None, end: RunEnd) -> str:
    """Return what to do after an end."""
    if end.code == ExitCode.BAD_NUMBERS and attempt is not None:
        paths = (attempt / BAD_STEPS).glob("*.json")
        bundles = [(step, path) for path in paths if (step := step_number(path.stem)) is not None]
        return f"titan run replay {max(bundles)[1]}" if bundles else ""
    if end.code not in REPEATABLE:
        return ""
    with suppress(ValueError):  # a damaged configuration
        if switch_files(run)[0].kill.exists():
            return f"titan run stop {run} --clear"
    return "The same command continues the run."


def _position(beats: Mapping[int, Row]) -> str:
    """Return the phase and step of the rank that is behind the others."""
    if not beats:
        return ""
    beat = min(beats.values(), key=lambda beat: beat.get("step") or 0)
    step = beat.get("step")
    return f"{beat.get('phase')} at step {step:,}" if step else str(beat.get("phase"))


def _is_process_gone(beat: Row) -> bool:
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


def summarize_error(error: Row) -> str:
    """Return rank, phase, step and the last line of the traceback of an error record."""
    lines = str(error.get("traceback", "")).strip().splitlines()
    text = f": {lines[-1]}" if lines else ""
    return (
        f"error on rank {error.get('rank')} in phase {error.get('phase')} at step "
        f"{error.get('step')}{text}"
    )


def ranks_without_error(attempt: Path) -> list[int]:
    """Return the ranks of an attempt that left no error although others did."""
    failed = ranks_with_errors(attempt)
    return sorted(files_of_ranks(attempt / HEARTBEATS).keys() - failed) if failed else []


def _describe_silent_ranks(attempt: Path | None) -> str:
    """Return a text about `ranks_without_error`; "" without any."""
    silent = [] if attempt is None else ranks_without_error(attempt)
    if not silent:
        return ""
    return (
        f"; no error of rank {format_ranks(silent)}: killed (out of memory? see dmesg), or it hung"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the first ranks as text."""
    shown = [str(rank) for rank in ranks]
    more = " ..." if len(shown) > MAX_RANKS_SHOWN else ""
    return ", ".join(shown[:MAX_RANKS_SHOWN]) + more
