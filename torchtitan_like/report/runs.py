"""List runs with their state and progress, and send requests to a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_like.report.state import (
    ERROR,
    KILLED,
    STOPPED,
    UNREADABLE,
    RunState,
    find_state,
    is_run,
    switch_files,
)
from torchtitan_like.report.tolerant import newest_metrics, read_run_config
from torchtitan_like.util.exit_codes import WORTH_A_RETRY
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    EXIT,
    MANIFEST,
    METRICS,
    newest_attempt,
    numbered_folders,
)
from torchtitan_like.util.units import format_duration

MAX_DEPTH = 3  # of run directories below the given folder


@dataclass(frozen=True)
class RunSummary:
    """One run directory.

    state, reason, detail, advice, updated    see `RunState`
    checkpoint                                the newest step with a manifest
    problems                                  files that cannot be read in full
    """

    path: str
    state: str
    reason: str
    detail: str
    advice: str
    updated: float | None
    step: int | None
    total_steps: int | None
    loss: float | None
    checkpoint: int | None
    num_attempts: int
    problems: list[str] = field(default_factory=list)

    def format_row(self, now: float) -> str:
        """Return the line of `titan run ls`. now: Unix time."""
        label = RunState(self.state, self.reason).label
        step = "-" if self.step is None else f"{self.step:,}"
        steps = step if self.total_steps is None else f"{step}/{self.total_steps:,}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        age = "-"
        if self.updated is not None:
            age = f"{format_duration(max(0.0, now - self.updated))} ago"
        saved = "-" if self.checkpoint is None else f"step-{self.checkpoint}"
        return f"{self.path:<32} {label:<20} {steps:>15} {loss:>9} {age:>13}  {saved}".rstrip()


HEADER = f"{'run':<32} {'state':<20} {'step':>15} {'loss':>9} {'updated':>13}  checkpoint"


def list_runs(folder: Path, now: float) -> list[RunSummary]:
    """List the run directories at and below `folder`. now: Unix time. Raises ValueError if none."""
    runs = list(search_runs(folder))
    if not runs:
        raise ValueError(
            f"{folder} contains no run. Expected a folder with {METRICS}, {ATTEMPTS} or {EXIT}, up "
            f"to {MAX_DEPTH} levels below it. Give the folder of a run, or one that contains runs."
        )
    return [summarize_run(run, now) for run in runs]


def search_runs(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run directories at and below `folder`, at most `depth` levels below it."""
    if is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from search_runs(folder / entry.name, depth - 1)


def summarize_run(run: Path, now: float) -> RunSummary:
    """Return the state and progress of a run directory. now: Unix time."""
    rows, problems = newest_metrics(run)
    config: dict[str, Any] = {}
    try:
        config = read_run_config(run)
    except ValueError as error:
        problems.append(str(error))
    last: dict[str, Any] = rows[-1] if rows else {}
    state = find_state(run, now)
    attempt = newest_attempt(run)
    checkpoints = run / config.get("checkpoint", {}).get("folder", "checkpoint")
    return RunSummary(
        path=str(run),
        state=state.name,
        reason=state.reason,
        detail=state.detail,
        advice=state.advice,
        updated=state.updated,
        step=last.get("step"),
        total_steps=config.get("training", {}).get("steps"),
        loss=None if last.get("loss") is None else float(last["loss"]),
        checkpoint=_newest_checkpoint(checkpoints),
        num_attempts=0 if attempt is None else int(attempt.name),
        problems=problems,
    )


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        steps = numbered_folders(folder)
    except OSError:
        return None
    return next((step for step, path in reversed(steps) if (path / MANIFEST).exists()), None)


# ---- requests


def request_stop(run: Path, now: float) -> str:
    """Create the kill switch. Return a message about its effect. now: Unix time.

    Raises ValueError, and creates nothing, if the run has ended for good; OSError.
    """
    path = switch_files(run)[0].kill
    state = _readable_state(run, now)
    effect = "the run saves and ends with code 130"
    if _has_stopped(state):
        if state.end is not None and state.end.code not in WORTH_A_RETRY:
            raise ValueError(
                f"{run} has {state.line}. Expected a live run, or one that another job continues. "
                "Nothing was written."
            )
        effect = "the run has stopped already, and its next job ends at once"
    path.touch()
    return (
        f"{path} is created: {effect}. No run starts in this folder while the file exists. "
        f"To allow runs again: titan run stop {run} --clear"
    )


def clear_stop(run: Path) -> str:
    """Remove the kill switch. Return a message about its effect. Raises OSError, ValueError."""
    path = switch_files(run)[0].kill
    path.unlink(missing_ok=True)
    return f"{path} is removed: runs may start in this folder again"


def request_save(run: Path, now: float, *, export: bool = False) -> str:
    """Create the switch file that requests a checkpoint, or a Hugging Face export.

    now: Unix time. Raises ValueError if the run would ignore it, OSError.
    """
    paths, config = switch_files(run)
    if not config.get("checkpoint", {}).get("enable", False):
        raise ValueError(
            f"{run} would ignore the request: checkpoint.enable is false. Expected true. "
            "Start the run again with --checkpoint.enable."
        )
    state = _readable_state(run, now)
    if _has_stopped(state):
        raise ValueError(
            f"{run} has {state.line}. Expected a live run. "
            "Start it again, or work with its newest checkpoint."
        )
    path = paths.export if export else paths.save
    path.touch()
    return f"{path} is created: the run removes it and saves within its next steps"


def _readable_state(run: Path, now: float) -> RunState:
    state = find_state(run, now)
    if state.name == UNREADABLE:
        raise ValueError(state.detail)
    return state


def _has_stopped(state: RunState) -> bool:
    """Return True if the run has certainly stopped. A lost one may answer again."""
    return state.name == STOPPED and (state.end is not None or state.reason in (ERROR, KILLED))
