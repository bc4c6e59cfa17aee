"""Format the status of a run: progress, speed, disk, and the position of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.report.disk import checkpoints_left, free_space, newest_checkpoint
from torchtitan_like.report.files import (
    Row,
    median_step_seconds,
    newest_metrics,
    read_run_config,
)
from torchtitan_like.report.state import (
    RUNNING,
    SILENT_SECONDS,
    RunState,
    find_state,
    format_ranks,
)
from torchtitan_like.util.run_directory import (
    EXIT,
    newest_attempt,
    read_exit,
    read_heartbeats,
)
from torchtitan_like.util.units import GIB, format_clock

NO_STEP = "no step has finished yet"
# Key of a metrics row, digits after the decimal point, unit.
SPEEDS = (
    ("tps", 0, "tokens/s on each device"),
    ("tflops", 2, "TFLOP/s"),
    ("mfu", 1, "% MFU"),
    ("memory_gib", 2, "GiB"),
)


@dataclass(frozen=True)
class Progress:
    """Progress of a run, from the newest rows of its metrics.jsonl.

    rows: oldest first, at least one. total_steps: None if unknown.
    seconds_per_step: median of the rows; None if no two of them are neighbors.
    """

    rows: list[Row]
    total_steps: int | None
    seconds_per_step: float | None

    @property
    def step(self) -> int:
        """The newest step."""
        return int(self.rows[-1]["step"])

    def seconds_left(self) -> float | None:
        """Return the time of the remaining steps; None if there are none, or if it is unknown."""
        if self.seconds_per_step is None or not self.total_steps or self.step >= self.total_steps:
            return None
        return (self.total_steps - self.step) * self.seconds_per_step

    def position_line(self, now: float) -> str:
        """Return the newest step, its age and the tokens up to it. now: Unix time."""
        last = self.rows[-1]
        position = f"step {self.step:,}"
        position += f" of {self.total_steps:,}" if self.total_steps else ""
        age = format_clock(max(0.0, now - last["time"]))
        return f"{position} ({age} ago), {last['n_tokens_seen']:,} tokens"

    def loss_line(self) -> str:
        """Return loss, gradient norm and learning rate of the newest step."""
        last = self.rows[-1]
        loss = "none" if last.get("loss") is None else f"{float(last['loss']):.4f}"
        return f"loss {loss}, grad_norm {float(last['grad_norm']):.4f}, lr {last['lr']:.3g}"

    def rate_lines(self) -> list[str]:
        """Return the newest measured speeds, and the remaining time."""
        logged = next((row for row in reversed(self.rows) if "tps" in row), {})
        speeds = [
            f"{logged[key]:,.{digits}f} {unit}"
            for key, digits, unit in SPEEDS
            if logged.get(key) is not None
        ]
        lines = [", ".join(speeds)] if speeds else []
        left = self.seconds_left()
        if left is not None:
            lines.append(
                f"{self.seconds_per_step:.3g} s per step: {format_clock(left)} left, "
                "without checkpoints and validation"
            )
        return lines


def read_progress(run: Path) -> Progress | None:
    """Read the newest rows of a run; None if no step has finished.

    Raises OSError, and ValueError if `run` is not a run directory or a file is damaged.
    """
    total = total_steps(read_run_config(run))
    rows = newest_metrics(run)
    return Progress(rows, total, median_step_seconds(rows)) if rows else None


def status_lines(run: Path, now: float) -> list[str]:
    """Return the plain lines of `titan run watch`. now: Unix time.

    Raises OSError, and ValueError if `run` is not a run directory or a file is damaged.
    """
    progress = read_progress(run)
    lines = [NO_STEP]
    if progress is not None:
        lines = [progress.position_line(now), progress.loss_line(), *progress.rate_lines()]
    state = find_state(run, [] if progress is None else progress.rows, now)
    return [*lines, *state_lines(state), disk_line(run), *heartbeat_lines(run, now)]


def disk_line(run: Path) -> str:
    """Return the free space, and how many checkpoints fit. Raises OSError."""
    free = free_space(run)
    size = newest_checkpoint(run)
    line = f"disk: {free.num_bytes / GIB:,.1f} GiB free"
    if size is not None:
        line += f", room for {checkpoints_left(free, size):,} checkpoints"
    return line


def total_steps(config: dict[str, Any]) -> int | None:
    """Return `training.steps` of a resolved configuration."""
    steps = config.get("training", {}).get("steps")
    return steps if isinstance(steps, int) else None


def has_ended(run: Path) -> bool:
    """Return True if the run has recorded its end, and no new attempt has started since."""
    try:
        read_exit(run)
    except (OSError, ValueError):
        return False
    return True


def state_lines(state: RunState) -> list[str]:
    """Return a line with the reason why the run hangs or has stopped; no line for another run."""
    return [] if state.name == RUNNING else [state.line]


def heartbeat_lines(run: Path, now: float) -> list[str]:
    """Return one line for each position with its ranks, slowest first, and one for silent ranks."""
    attempt = newest_attempt(run)
    content = read_heartbeats(attempt) if attempt is not None else {}
    heartbeats = {rank: beat for rank, beat in content.items() if "time" in beat}
    ranks_at: dict[tuple[int, int, str], list[int]] = {}
    for rank, beat in heartbeats.items():
        key = beat.get("step") or 0, beat.get("micro_batch") or 0, beat.get("phase") or ""
        ranks_at.setdefault(key, []).append(rank)
    lines = []
    for (step, micro_batch, phase), ranks in sorted(ranks_at.items()):
        oldest = max(now - heartbeats[rank]["time"] for rank in ranks)
        position = f"step {step} micro-batch {micro_batch} {phase}".rstrip()
        age = format_clock(max(0.0, oldest))
        lines.append(
            f"{len(ranks)} of {len(heartbeats)} ranks in {position}, "
            f"last heartbeat up to {age} ago: {format_ranks(ranks)}"
        )
    silent = [rank for rank, beat in heartbeats.items() if now - beat["time"] > SILENT_SECONDS]
    if silent and not (run / EXIT).exists():
        lines.append(f"SILENT for more than {SILENT_SECONDS:g} s: ranks {format_ranks(silent)}")
    return lines
