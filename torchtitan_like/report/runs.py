"""List run directories with the progress and the state of each run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.files import newest_metrics, read_run_config
from torchtitan_like.report.status import SILENT_SECONDS, format_clock, total_steps
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    CONFIG,
    MANIFEST,
    METRICS,
    heartbeat_file,
    newest_attempt,
    read_exit,
    step_name,
    step_number,
)

MAX_DEPTH = 3  # of run directories below the given folder
TAIL_BYTES = 2**16  # of metrics.jsonl: enough for its last row


@dataclass(frozen=True)
class RunSummary:
    """One run directory.

    state        running, silent (no heartbeat or progress for a minute), or the reason in exit.json
    updated      Unix time of the newest row or heartbeat
    checkpoint   the newest step with a manifest
    """

    path: str
    state: str
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    updated: float | None = None
    checkpoint: int | None = None
    num_attempts: int = 0

    def format_row(self, now: float) -> str:
        """Return the line of `titan run ls`. now: Unix time."""
        step = "-" if self.step is None else f"{self.step:,}"
        steps = step if self.total_steps is None else f"{step}/{self.total_steps:,}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        age = "-" if self.updated is None else f"{format_clock(max(0.0, now - self.updated))} ago"
        saved = "-" if self.checkpoint is None else f"step-{self.checkpoint}"
        return f"{self.path:<32} {self.state:<12} {steps:>15} {loss:>9} {age:>16}  {saved}".rstrip()


HEADER = f"{'run':<32} {'state':<12} {'step':>15} {'loss':>9} {'updated':>16}  checkpoint"


def list_runs(folder: Path, now: float) -> list[RunSummary]:
    """List the run directories at and below `folder`. now: Unix time. Raises ValueError if none."""
    return [summarize_run(run, now) for run in find_runs(folder)]


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at and below `folder`. Raises ValueError if there are none."""
    runs = list(search_runs(folder))
    if not runs:
        raise ValueError(
            f"{folder} contains no run. Expected a folder with {CONFIG} and {METRICS}, up to "
            f"{MAX_DEPTH} levels below it. Give the folder of a run, or one that contains runs."
        )
    return runs


def search_runs(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run directories at and below `folder`, at most `depth` levels below it."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    if CONFIG in names and names & {ATTEMPTS, METRICS}:
        yield folder
        return
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from search_runs(folder / entry.name, depth - 1)


def summarize_run(run: Path, now: float) -> RunSummary:
    """Return the state and progress of a run directory. now: Unix time."""
    try:
        config = read_run_config(run)
        rows = newest_metrics(run, TAIL_BYTES)
    except (OSError, ValueError):
        return RunSummary(str(run), "unreadable")
    last: dict[str, Any] = rows[-1] if rows else {}
    attempt = newest_attempt(run)
    signs = [run / METRICS, run / CONFIG]
    if attempt is not None:
        signs.append(heartbeat_file(attempt, 0))
    updated = max((time for time in map(_modified, signs) if time is not None), default=None)
    return RunSummary(
        path=str(run),
        state=_state(run, updated, now),
        step=last.get("step"),
        total_steps=total_steps(config),
        loss=None if last.get("loss") is None else float(last["loss"]),
        updated=updated,
        checkpoint=_newest_checkpoint(
            run / config.get("checkpoint", {}).get("folder", "checkpoint")
        ),
        num_attempts=0 if attempt is None else int(attempt.name),
    )


def _state(run: Path, updated: float | None, now: float) -> str:
    try:
        return read_exit(run).reason
    except FileNotFoundError:
        is_silent = updated is None or now - updated > SILENT_SECONDS
        return "silent" if is_silent else "running"
    except (OSError, ValueError):
        return "unreadable"


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    numbers = (step_number(name) for name in names)
    steps = sorted((number for number in numbers if number is not None), reverse=True)
    return next((step for step in steps if (folder / step_name(step) / MANIFEST).exists()), None)
