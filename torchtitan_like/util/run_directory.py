"""Names and readers of the run directory (`job.dump_folder`), for the trainer and for tools.

    config.toml            resolved configuration of the newest attempt
    metrics.jsonl          one row per step
    validation.jsonl       one row per validation
    eval.jsonl             one row per checkpoint, task and metric of `titan eval`
    events.jsonl           checkpoints, spikes, stops
    plan.json              predicted memory and step time, to compare the run with
    exit.json              reason, code and step of the end; absent while a run is alive
    slurm.json             starts of a Slurm job in a row without a new checkpoint
    SAVE, EXPORT, KILL     switch files: create one to send a request to the run
    <checkpoint.folder>/   run.lock
        step-<n>/          manifest.json, config.toml; PIN: prevents its deletion
    attempts/<n>/          one start of all ranks of the job; 0: errors of starts without a number
        config.toml        environment/
        logs/rank<r>.log   heartbeat/rank-<r>.json
        errors/rank-<r>.json, errors/first.json
        bad-steps/step-<k>.json

Readers take the path of the run directory, or of one attempt in it. They never import torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.util.files import StorageError, write_atomically
from torchtitan_like.util.reading import (
    BOOLEAN,
    FINITE,
    INTEGER,
    TEXT,
    Kind,
    check_kinds,
    read_json,
    read_text,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
EVALUATION = "eval.jsonl"
EVENTS = "events.jsonl"
EXIT = "exit.json"
STARTS = "slurm.json"
EXPORT_SWITCH = "EXPORT"  # `resilience` names the other two
ATTEMPTS = "attempts"

# In the folder of the checkpoints, and in each of them.
LOCK = "run.lock"
STEP = re.compile(r"step-(\d+)")
MANIFEST = "manifest.json"
PIN = "PIN"  # users may write a reason into it

# Name of the time in which a step waits for its batch, in profiler traces.
DATA_WAIT = "data wait"

# In the folder of an attempt.
ENVIRONMENT = "environment"
LOGS = "logs"
HEARTBEATS = "heartbeat"
ERRORS = "errors"
FIRST_ERROR = "first.json"
BAD_STEPS = "bad-steps"

# Settings that tools read, and content of a heartbeat. Other settings and keys may have any value.
CONFIG_KINDS: dict[str, dict[str, Kind]] = {
    "job": {"dump_folder": TEXT},
    "training": {"steps": INTEGER},
    "checkpoint": {"enable": BOOLEAN, "folder": TEXT, "load_step": INTEGER},
    "resilience": {"kill_switch_path": TEXT, "save_switch_path": TEXT},
}
HEARTBEAT_KINDS = {"phase": TEXT, "step": INTEGER, "micro_batch": INTEGER, "time": FINITE}

# Environment variable, set by the launcher: its own folder, for exit.json if the run's is full.
LAUNCHER_FOLDER = "TORCHTITAN_LIKE_LAUNCHER_FOLDER"


class RunEnd(NamedTuple):
    """Content of exit.json. step: None if the run ended before its first step."""

    reason: str
    code: int
    step: int | None

    def __str__(self) -> str:
        where = "before the first step" if self.step is None else f"at step {self.step:,}"
        return f"{self.reason} (code {self.code}) {where}"


class SwitchPaths(NamedTuple):
    """Paths of the switch files of a run."""

    kill: Path
    save: Path
    export: Path


# ---- the run


def read_config(run: Path) -> dict[str, Any]:
    """Read the resolved configuration of the newest attempt. Raises OSError, ValueError."""
    return parse_config(read_text(run / CONFIG))


def parse_config(text: str) -> dict[str, dict[str, Any]]:
    """Parse a resolved configuration. Raises ValueError for a value that no tool can use."""
    try:
        config: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for name, section in config.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {str(section)[:40]!r}, not a table")
        try:
            check_kinds(section, CONFIG_KINDS.get(name, {}))
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
    return config


def switch_paths(run: Path, kill_path: str, save_path: str) -> SwitchPaths:
    """Return the paths of the switch files. Configured paths may be outside `run`."""
    return SwitchPaths(run / kill_path, run / save_path, run / EXPORT_SWITCH)


def read_exit(run: Path) -> RunEnd:
    """Read exit.json. Raises OSError, and ValueError if it is malformed."""
    path = run / EXIT
    try:
        content = read_json(path)
        check_kinds(content, {"reason": TEXT, "code": INTEGER, "step": INTEGER})
        return RunEnd(str(content["reason"]), int(content["code"]), content["step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is malformed: {error}. Expected reason, code and step: remove it."
        ) from error


def write_exit(run: Path, end: RunEnd) -> None:
    """Write exit.json. Raises OSError."""
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / EXIT, json.dumps(end._asdict()) + "\n")


def write_exit_for_launcher(end: RunEnd) -> None:
    """Write exit.json into the launcher's folder, for a run whose folder cannot be written.

    Raises StorageError if `LAUNCHER_FOLDER` is unset, or if that folder is full too.
    """
    folder = os.environ.get(LAUNCHER_FOLDER)
    message = (
        f"The run ended with {end.reason} (code {end.code}), "
        "and exit.json could not be written anywhere"
    )
    if not folder:
        raise StorageError(message)
    try:
        write_exit(Path(folder), end)
    except OSError as error:
        raise StorageError(f"{message}: {error}") from error


def find_run(path: Path) -> Path | None:
    """Return the run directory that contains `path`, such as a checkpoint; None outside of runs."""
    parents = path.resolve().parents
    return next((parent for parent in parents if (parent / ATTEMPTS).is_dir()), None)


# ---- checkpoints


def step_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step}"


def step_number(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if it is another name."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None


def numbered_folders(folder: Path, pattern: re.Pattern[str] = STEP) -> list[tuple[int, Path]]:
    """Return every `step-N` of `folder` with its number, in order, regardless of its content.

    Reads one listing, without a stat per entry. pattern: of other names with a number.
    """
    try:
        with os.scandir(folder) as entries:
            folders = [
                (int(match[1]), folder / entry.name)
                for entry in entries
                if (match := pattern.fullmatch(entry.name)) and entry.is_dir()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folders)


def steps_below(path: Path) -> list[tuple[int, Path]]:
    """Return the steps with a manifest in `path`, or else in the folders of `path`, in order."""
    for pattern in (f"step-*/{MANIFEST}", f"*/step-*/{MANIFEST}"):
        folders = [manifest.parent for manifest in path.glob(pattern)]
        numbers = ((step_number(folder.name), folder) for folder in folders)
        steps = [(number, folder) for number, folder in numbers if number is not None]
        if steps:
            return sorted(steps)
    return []


# ---- attempts


def attempt_folder(run: Path, number: int) -> Path:
    """Return the folder of an attempt; 0 has the errors of starts without a number."""
    return run / ATTEMPTS / str(number)


def numbered_attempts(run: Path) -> list[Path]:
    """List the folders of the attempts of a run, oldest first."""
    try:
        names = [name for name in os.listdir(run / ATTEMPTS) if name.isdecimal() and int(name) > 0]
    except OSError:
        return []
    return [run / ATTEMPTS / name for name in sorted(names, key=int)]


def newest_attempt(run: Path) -> Path | None:
    """Return the folder of the newest attempt, or None if there is none."""
    attempts = numbered_attempts(run)
    return attempts[-1] if attempts else None


def log_file(attempt: Path, rank: int) -> Path:
    """Return the path of a rank's log file."""
    return attempt / LOGS / f"rank{rank}.log"


def heartbeat_file(attempt: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return attempt / HEARTBEATS / f"rank-{rank}.json"


def read_heartbeats(attempt: Path, max_ranks: int | None = None) -> dict[int, dict[str, Any]]:
    """Read the heartbeats of an attempt by rank: phase, step, micro_batch, time, host, pid.

    Skips malformed files, because their ranks may be replacing them. max_ranks: None reads all.
    """
    heartbeats = {}
    for rank, path in list(files_of_ranks(attempt / HEARTBEATS).items())[:max_ranks]:
        try:
            content = read_json(path)
            check_kinds(content, HEARTBEAT_KINDS)
        except (OSError, ValueError, AttributeError):
            continue
        heartbeats[rank] = content
    return heartbeats


def files_of_ranks(folder: Path) -> dict[int, Path]:
    """Return the heartbeats or error records in a folder, by rank. Skips files of other names."""
    numbered = ((path.stem.removeprefix("rank-"), path) for path in folder.glob("rank-*.json"))
    return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))


# ---- errors of an attempt


def error_file(attempt: Path, rank: int) -> Path:
    """Return the path of a rank's error record."""
    return attempt / ERRORS / f"rank-{rank}.json"


def ranks_with_errors(attempt: Path) -> set[int]:
    """Return the ranks of an attempt that left an error record, without reading the records."""
    return set(files_of_ranks(attempt / ERRORS))


def read_errors(attempt: Path) -> list[dict[str, Any]]:
    """Read the error records of an attempt. Raises OSError, and ValueError if one is malformed.

    The earliest error is the cause: the other ranks then fail on broken connections.
    """
    return [_read_error(path) for path in files_of_ranks(attempt / ERRORS).values()]


def read_first_error(attempt: Path) -> dict[str, Any] | None:
    """Read the earliest error record of an attempt; None without errors. Reads only one file.

    Raises ValueError if it is malformed.
    """
    try:
        return _read_error(attempt / ERRORS / FIRST_ERROR)
    except OSError:
        return None


def earliest_error(attempt: Path, since: float = 0.0) -> dict[str, Any] | None:
    """Return the earliest error record of an attempt since then; None without one.

    Thousands of ranks write thousands of records. For an attempt with a number, only the first one
    is read. Raises OSError, and ValueError if one is malformed.
    """
    first = read_first_error(attempt) if attempt.name != "0" else None
    records = read_errors(attempt) if first is None else [first]
    recent = [record for record in records if record.get("time", 0.0) >= since]
    return min(recent, key=lambda record: float(record.get("time", 0.0)), default=None)


def _read_error(path: Path) -> dict[str, Any]:
    try:
        record = dict(read_json(path))
        check_kinds(record, {"time": FINITE})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is malformed: {error}. Expected an error: remove it.") from error
    return record


def describe_error(record: dict[str, Any]) -> str:
    """Format an error record: host, rank, step and phase, then the traceback."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    gpu = "" if record.get("gpu") is None else f"GPU {record['gpu']}, "
    head = (
        f"{when}, host {record['host']}, {gpu}rank {record['rank']}, step {record['step']}, "
        f"phase {record['phase']}:"
    )
    return f"{head}\n{record['traceback'].rstrip()}"
