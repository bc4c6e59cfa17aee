"""Everything that a run directory records about a run, for its report.

The directory may be copied, damaged, or still being written. What cannot be
read is listed in `RecordedRun.problems`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_like.config.layers import leaves
from torchtitan_like.report.columns import Columns, Floats, read_columns
from torchtitan_like.report.state import UNREADABLE, RunState, find_state, require_run
from torchtitan_like.report.tolerant import EVENT_KINDS, Row, as_time, read_rows
from torchtitan_like.util.plan_file import MEMORY_STEP, MODULES_EVENT, TIME_STEP, Measured
from torchtitan_like.util.reading import read_json, read_text
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    EVENTS,
    HEARTBEATS,
    LOGS,
    MANIFEST,
    METRICS,
    VALIDATION,
    files_of_ranks,
    log_file,
    numbered_attempts,
    parse_config,
    read_errors,
    read_first_error,
    read_heartbeats,
    steps_below,
)

MAX_WARNINGS = 200  # distinct ones of an attempt
MAX_LOG_LINE = 2**16  # bytes that are read of a line
MAX_ENVIRONMENT_BYTES = 2**20  # of each file
ENVIRONMENT_FILES = ("facts.json", "git.txt", "variables.txt", "packages.txt")

_WARNING = re.compile(
    r"^\[titan\] (?P<time>\S+ \S+) - \S+ - (?P<level>WARNING|ERROR|CRITICAL) - (?P<text>.*)$"
)
_SIZE = re.compile(r"Model (?P<model>.+) size: (?P<parameters>[\d,]+) total parameters")
_DIGITS = re.compile(r"\d+")


@dataclass
class Warned:
    """A log line of level WARNING or above. count: lines that differ from it only in numbers."""

    level: str
    time: str
    text: str
    count: int = 1


@dataclass
class RecordedAttempt:
    """What one attempt has left.

    start: seconds since 1970 at which its process started; None: unknown. first_event: time of its
    first event. started: its "start" event; empty if it never trained.
    config: settings by dotted name. environment: file name -> text.
    num_ranks: None if unknown. last_sign: time of the newest heartbeat of any rank.
    error: its first error record. model, num_parameters: of its log.
    """

    number: int
    start: float | None = None
    first_event: float | None = None
    started: Row = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    num_ranks: int | None = None
    last_sign: float | None = None
    hosts: set[str] = field(default_factory=set)
    error: Row | None = None
    error_times: list[float] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    model: str | None = None
    num_parameters: int | None = None


@dataclass
class RecordedCheckpoint:
    """One folder with a manifest. state: "complete", or what is missing."""

    name: str
    step: int
    kind: str
    num_bytes: int
    num_files: int
    state: str
    is_pinned: bool
    layout: str


@dataclass
class RecordedRun:
    """A run directory. discarded: attempt that discarded them -> rows of its file."""

    name: str
    path: str
    metrics: Columns
    validation: list[Row]
    events: list[Row]
    evals: list[Row]
    discarded: dict[int, Columns]
    discarded_validation: list[Row]
    attempts: list[RecordedAttempt]
    checkpoints: list[RecordedCheckpoint]
    config: dict[str, Any]
    state: RunState
    problems: list[str]

    def hosts(self) -> set[str]:
        """Return the names of all machines that the run names."""
        return set().union(*(attempt.hosts for attempt in self.attempts))


def read_run(run: Path) -> RecordedRun:
    """Read a run directory. Raises ValueError if `run` is not one."""
    require_run(run)
    metrics, problems = read_columns(run / METRICS)
    validation, more = read_rows(run / VALIDATION, ("step",))
    problems += more
    events, more = read_rows(run / EVENTS, ("event",), EVENT_KINDS)
    problems += more
    evals, more = read_rows(run / EVALUATION)
    problems += more
    discarded, discarded_validation = {}, []
    for file in sorted(run.glob("*.discarded-*.jsonl")):
        stem, _, number = file.stem.partition(".discarded-")
        if not number.isdecimal():
            continue
        if f"{stem}.jsonl" == METRICS:
            discarded[int(number)], more = read_columns(file)
        else:
            rows, more = read_rows(file, ("step",))
            discarded_validation += rows
        problems += more
    attempts = _read_attempts(run, events, problems)
    state = find_state(run, time.time())
    if state.name == UNREADABLE:
        problems.append(state.detail)
    config = _read_settings(run / CONFIG, CONFIG, problems)
    if not config and attempts:
        config = attempts[-1].config
    return RecordedRun(
        name=run.resolve().name,
        path=str(run.resolve()),
        metrics=metrics,
        validation=validation,
        events=events,
        evals=evals,
        discarded=dict(sorted(discarded.items())),
        discarded_validation=discarded_validation,
        attempts=attempts,
        checkpoints=_read_checkpoints(run, problems),
        config=config,
        state=state,
        problems=problems,
    )


def measured_steps(recorded: RecordedRun) -> Measured:
    """Return what the newest attempt measured on rank 0, with which plans are compared.

    Memory of a GPU's allocator at the first log line from step 3 on, and the median time from step
    10 on. Pauses of checkpoints and validations are not part of it. The run must have an attempt.
    """
    attempt = recorded.attempts[-1]
    metrics = recorded.metrics
    steps = metrics.get("step") - float(attempt.started.get("step") or 0)
    is_log_step = np.isfinite(metrics.get("step_s"))
    try:
        has_gpu = bool(json.loads(attempt.environment.get("facts.json", "{}")).get("gpus"))
    except (AttributeError, ValueError):
        has_gpu = False
    memory = metrics.get("memory_gib")[is_log_step & (steps >= MEMORY_STEP)]
    times = metrics.get("step_s")[is_log_step & (steps >= TIME_STEP)]
    return Measured(
        float(memory[0]) if has_gpu and len(memory) else None,
        float(np.median(times)) if len(times) else None,
    )


def measured_modules(recorded: RecordedRun) -> Any:
    """Return the bytes that the newest attempt found in each module; {} if it trained no step."""
    number = recorded.attempts[-1].number
    events = [event for event in recorded.events if event.get("attempt") == number]
    return next((e.get("modules") for e in events if e.get("event") == MODULES_EVENT), {})


def _read_settings(file: Path, label: str, problems: list[str]) -> dict[str, Any]:
    """Return the settings of a config.toml by dotted name; {} if it cannot be read.

    label: the file's name in a problem.
    """
    try:
        table = parse_config(read_text(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{label}: cannot be used: {error}")
        return {}
    return {".".join(path): value for path, value in leaves(table)}


# ---- attempts


def _read_attempts(run: Path, events: Iterable[Row], problems: list[str]) -> list[RecordedAttempt]:
    """Return the attempts with a folder or an event, oldest first."""
    attempts = {int(folder.name): folder for folder in numbered_attempts(run)}
    recorded = {
        number: _read_attempt(number, folder, problems) for number, folder in attempts.items()
    }
    for event in events:
        number, time = event.get("attempt"), as_time(event.get("time"))
        if not isinstance(number, int) or number < 1:
            continue
        attempt = recorded.setdefault(number, RecordedAttempt(number))
        if event["event"] == "start":
            attempt.started = event
            attempt.start = as_time(event.get("began")) or time
            if isinstance(event.get("num_ranks"), int):
                attempt.num_ranks = event["num_ranks"]
        elif attempt.first_event is None:
            attempt.first_event = time
    return [attempt for _, attempt in sorted(recorded.items())]


def _read_attempt(number: int, folder: Path, problems: list[str]) -> RecordedAttempt:
    label = f"{ATTEMPTS}/{number}/{CONFIG}"
    attempt = RecordedAttempt(number, config=_read_settings(folder / CONFIG, label, problems))
    for name in ENVIRONMENT_FILES:
        with suppress(OSError, ValueError):
            attempt.environment[name] = read_text(
                folder / ENVIRONMENT / name, MAX_ENVIRONMENT_BYTES
            )
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        facts = dict(read_json(folder / ENVIRONMENT / "facts.json"))
    with suppress(KeyError, TypeError, ValueError):
        attempt.start = datetime.strptime(facts["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    attempt.hosts |= {str(facts["host"])} if "host" in facts else set()
    heartbeats = read_heartbeats(folder)
    if malformed := files_of_ranks(folder / HEARTBEATS).keys() - heartbeats.keys():
        ranks = ", ".join(map(str, sorted(malformed)))
        problems.append(f"{ATTEMPTS}/{folder.name}/heartbeat: cannot be used: ranks {ranks}")
    attempt.last_sign = max(
        (time for beat in heartbeats.values() if (time := as_time(beat.get("time"))) is not None),
        default=None,
    )
    attempt.hosts |= {str(beat["host"]) for beat in heartbeats.values() if "host" in beat}
    attempt.num_ranks = len(heartbeats) or len(list((folder / LOGS).glob("rank*.log"))) or None
    _read_errors(folder, attempt, problems)
    _read_log(log_file(folder, 0), attempt, problems)
    return attempt


def _read_errors(folder: Path, attempt: RecordedAttempt, problems: list[str]) -> None:
    label = f"{ATTEMPTS}/{folder.name}/errors"
    try:
        attempt.error = read_first_error(folder)
        records = read_errors(folder)
    except (OSError, ValueError, TypeError) as error:
        problems.append(f"{label}: a record cannot be read: {type(error).__name__}")
        return
    times = (as_time(record.get("time")) for record in records)
    attempt.error_times = [time for time in times if time is not None]
    attempt.hosts |= {str(record["host"]) for record in records if "host" in record}


def _read_log(file: Path, attempt: RecordedAttempt, problems: list[str]) -> None:
    """Collect the warnings and the model's size from a log, without keeping its lines."""
    warnings: dict[str, Warned] = {}
    num_more = 0
    try:
        with file.open("rb") as lines:
            while raw := lines.readline(MAX_LOG_LINE):
                line = raw.decode(errors="replace").rstrip("\n")
                if (size := _SIZE.search(line)) is not None:
                    attempt.model = size["model"]
                    attempt.num_parameters = int(size["parameters"].replace(",", ""))
                if (found := _WARNING.match(line)) is None:
                    continue
                key = _DIGITS.sub("#", found["text"])
                if key in warnings:
                    warnings[key].count += 1
                elif len(warnings) < MAX_WARNINGS:
                    warnings[key] = Warned(found["level"], found["time"], found["text"])
                else:
                    num_more += 1
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{ATTEMPTS}/{attempt.number}/{LOGS}: cannot be read: {error.strerror}")
    if num_more:
        problems.append(
            f"{ATTEMPTS}/{attempt.number}/{LOGS}: {num_more:,} more warnings are not shown"
        )
    attempt.warnings = list(warnings.values())


# ---- checkpoints


def _read_checkpoints(run: Path, problems: list[str]) -> list[RecordedCheckpoint]:
    """Return the steps in any checkpoint folder, in order."""
    checkpoints = []
    for _, folder in steps_below(run):
        try:
            checkpoints.append(_read_checkpoint(folder, dict(read_json(folder / MANIFEST))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if folder.exists():  # a live run deletes old checkpoints
                problems.append(
                    f"{folder.parent.name}/{folder.name}/{MANIFEST}: cannot be used: "
                    f"{type(error).__name__}"
                )
    return checkpoints


def _read_checkpoint(folder: Path, manifest: Mapping[str, Any]) -> RecordedCheckpoint:
    files = {str(name): int(record["size"]) for name, record in manifest.get("files", {}).items()}
    wrong = []
    for name, size in files.items():
        if os.path.isabs(name) or ".." in Path(name).parts:
            wrong.append(f"{name} is outside of the checkpoint")
            continue
        try:
            actual = (folder / name).lstat().st_size
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if actual != size:
            wrong.append(f"{name} has {actual:,} bytes, expected {size:,}")
    return RecordedCheckpoint(
        name=f"{folder.parent.name}/{folder.name}",
        step=int(manifest["step"]),
        kind=str(manifest["kind"]),
        num_bytes=sum(files.values()),
        num_files=len(files),
        state="; ".join(wrong[:3]) or "complete",
        is_pinned=(folder / "PIN").exists(),
        layout=str(dict(manifest.get("numeric") or {}).get("layout", "")),
    )


# ---- values


def rows_as_floats(rows: Iterable[Row], key: str) -> Floats:
    """Return one value of each row, float64 (rows,); NaN where it is missing or not a number."""
    values = (row.get(key) for row in rows)
    return np.array(
        [float(v) if isinstance(v, (int, float)) else np.nan for v in values], dtype=np.float64
    )
