"""List run directories with the progress and the state of each run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.files import newest_metrics, read_run_config
from torchtitan_like.report.state import UNREADABLE, find_state
from torchtitan_like.report.status import total_steps
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    CONFIG,
    MANIFEST,
    METRICS,
    newest_attempt,
    step_name,
    step_number,
)
from torchtitan_like.util.units import format_clock

MAX_DEPTH = 3  # of run directories below the given folder
TAIL_BYTES = 2**16  # of metrics.jsonl: enough for its last row


@dataclass(frozen=True)
class RunSummary:
    """One run directory.

    state, reason, detail, updated    see `RunState`
    checkpoint                        the newest step with a manifest
    """

    path: str
    state: str
    reason: str = ""
    detail: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    updated: float | None = None
    checkpoint: int | None = None
    num_attempts: int = 0

    def format_row(self, now: float) -> str:
        """Return the line of `titan run ls`. now: Unix time."""
        label = f"{self.state}: {self.reason}" if self.reason else self.state
        step = "-" if self.step is None else f"{self.step:,}"
        steps = step if self.total_steps is None else f"{step}/{self.total_steps:,}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        age = "-" if self.updated is None else f"{format_clock(max(0.0, now - self.updated))} ago"
        saved = "-" if self.checkpoint is None else f"step-{self.checkpoint}"
        return f"{self.path:<32} {label:<20} {steps:>15} {loss:>9} {age:>16}  {saved}".rstrip()


HEADER = f"{'run':<32} {'state':<20} {'step':>15} {'loss':>9} {'updated':>16}  checkpoint"


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
    except (OSError, ValueError) as error:
        return RunSummary(str(run), UNREADABLE, detail=str(error))
    last: dict[str, Any] = rows[-1] if rows else {}
    state = find_state(run, rows, now)
    attempt = newest_attempt(run)
    return RunSummary(
        path=str(run),
        state=state.name,
        reason=state.reason,
        detail=state.detail,
        step=last.get("step"),
        total_steps=total_steps(config),
        loss=None if last.get("loss") is None else float(last["loss"]),
        updated=state.updated,
        checkpoint=_newest_checkpoint(
            run / config.get("checkpoint", {}).get("folder", "checkpoint")
        ),
        num_attempts=0 if attempt is None else int(attempt.name),
    )


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    numbers = (step_number(name) for name in names)
    steps = sorted((number for number in numbers if number is not None), reverse=True)
    return next((step for step in steps if (folder / step_name(step) / MANIFEST).exists()), None)
