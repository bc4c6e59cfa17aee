"""Format the status of a run: progress, speed, disk, and the position of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.report.disk import checkpoints_left, free_space, newest_checkpoint
from torchtitan_like.report.files import newest_metrics, read_run_config, step_seconds
from torchtitan_like.util.run_directory import (
    EXIT,
    newest_attempt,
    read_exit,
    read_heartbeats,
)
from torchtitan_like.util.units import GIB

SILENT_SECONDS = 60.0  # without a heartbeat
MAX_RANKS_SHOWN = 8
# Key of a metrics row, digits after the decimal point, unit.
SPEEDS = (
    ("tps", 0, "tokens/s on each device"),
    ("tflops", 2, "TFLOP/s"),
    ("mfu", 1, "% MFU"),
    ("memory_gib", 2, "GiB"),
)


def status_lines(run: Path, now: float) -> list[str]:
    """Return the lines of `titan run watch`. now: Unix time.

    Raises OSError, and ValueError if `run` is not a run directory or a file is damaged.
    """
    progress = progress_lines(run, now)
    free = free_space(run)
    size = newest_checkpoint(run)
    disk = f"disk: {free.num_bytes / GIB:,.1f} GiB free"
    if size is not None:
        disk += f", room for {checkpoints_left(free, size):,} checkpoints"
    return [*progress, *end_lines(run), disk, *heartbeat_lines(run, now)]


def progress_lines(run: Path, now: float) -> list[str]:
    """Return step, loss, speed, and remaining time from the median of the newest steps."""
    total = total_steps(read_run_config(run))
    rows = newest_metrics(run)
    if not rows:
        return ["no step has finished yet"]
    last = rows[-1]
    position = f"step {last['step']:,} of {total:,}" if total else f"step {last['step']:,}"
    age = format_clock(max(0.0, now - last["time"]))
    lines = [
        f"{position} ({age} ago), {last['n_tokens_seen']:,} tokens",
        f"loss {float(last['loss']):.4f}, grad_norm {float(last['grad_norm']):.4f}, "
        f"lr {last['lr']:.3g}",
    ]
    logged = next((row for row in reversed(rows) if "tps" in row), {})
    speeds = [
        f"{logged[key]:,.{digits}f} {unit}"
        for key, digits, unit in SPEEDS
        if logged.get(key) is not None
    ]
    if speeds:
        lines.append(", ".join(speeds))
    seconds = sorted(step_seconds(rows))
    if seconds and total and last["step"] < total:
        median = seconds[len(seconds) // 2]
        left = format_clock((total - last["step"]) * median)
        lines.append(f"{median:.3g} s per step: {left} left, without checkpoints and validation")
    return lines


def total_steps(config: dict[str, Any]) -> int | None:
    """Return `training.steps` of a resolved configuration."""
    steps = config.get("training", {}).get("steps")
    return steps if isinstance(steps, int) else None


def end_lines(run: Path) -> list[str]:
    """Return a line with the reason why the run ended; no line for a live run."""
    try:
        end = read_exit(run)
    except (OSError, ValueError):
        return []
    return [f"ended at step {end.step}: {end.reason} (code {end.code})"]


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
            f"last heartbeat up to {age} ago: {_format_ranks(ranks)}"
        )
    silent = [rank for rank, beat in heartbeats.items() if now - beat["time"] > SILENT_SECONDS]
    if silent and not (run / EXIT).exists():
        lines.append(f"SILENT for more than {SILENT_SECONDS:g} s: ranks {_format_ranks(silent)}")
    return lines


def format_clock(seconds: float) -> str:
    """Return a text such as `3 d 04:05 h`, `4:05 h`, `5:06 min` or `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    if hours:
        return f"{hours}:{minutes:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def _format_ranks(ranks: Sequence[int]) -> str:
    more = " ..." if len(ranks) > MAX_RANKS_SHOWN else ""
    return ", ".join(map(str, ranks[:MAX_RANKS_SHOWN])) + more
