"""Compute the cost of checkpoints and failures for several checkpoint intervals."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.report.files import newest_rows, step_seconds
from torchtitan_like.util.run_directory import EVENTS, METRICS
from torchtitan_like.util.units import format_duration

FACTORS = (0.25, 0.5, 1, 2, 4)  # of the best interval


class Times(NamedTuple):
    """Median times of a run, and the number of checkpoints and steps that were measured."""

    save_seconds: float
    step_seconds: float
    num_saves: int
    num_steps: int


def measure_times(run: Path) -> Times:
    """Measure a run's newest full checkpoints and steps. Raises ValueError if it has too few."""
    events = newest_rows(run / EVENTS)
    saves = [e["seconds"] for e in events if e["event"] == "save" and e["form"] == "full"]
    steps = step_seconds(newest_rows(run / METRICS))
    if not (saves and steps):
        raise ValueError(
            f"{run} has {len(saves)} full checkpoints and {len(steps) + 1} steps. Expected at least one "
            "checkpoint and two steps. Try again later, or give --save-seconds and --step-seconds."
        )
    return Times(statistics.median(saves), statistics.median(steps), len(saves), len(steps))


def interval_table(
    save_seconds: float, step_seconds: float, mtbf_seconds: float, interval: int | None
) -> list[str]:
    """Return the lines of the table. The formula of Young and Daly gives the best interval.

    interval: another one, in steps, to compare with.
    """
    best_steps = math.sqrt(2 * save_seconds * mtbf_seconds) / step_seconds
    best = max(1, round(best_steps))
    candidates = {max(1, round(best_steps * factor)) for factor in FACTORS}
    if interval:
        candidates.add(interval)
    lines = [
        f"{'steps':>8} {'time between':>14} {'time saving':>12} {'lost per failure':>17} "
        f"{'lost in all':>12}"
    ]
    for steps in sorted(candidates):
        between = steps * step_seconds
        saving = save_seconds / (between + save_seconds)
        lost = (between + save_seconds) / 2
        note = ""
        if steps == best:
            note = "  <- best (Young, Daly)"
        elif steps == interval:
            note = "  <- given"
        lines.append(
            f"{steps:>8,} {format_duration(between):>14} {saving:>12.2%} "
            f"{format_duration(lost):>17} {saving + lost / mtbf_seconds:>12.2%}{note}"
        )
    return lines
