"""Print what checkpoints and failures cost for several intervals between checkpoints.

    python scripts/ckpt_interval.py --run /shared/run1 --mtbf-hours 12
    python scripts/ckpt_interval.py --save-seconds 40 --step-seconds 2.5 --mtbf-hours 12

The best interval is sqrt(2 C M) seconds, with C seconds a checkpoint and M seconds between
failures: Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006. A failure loses half an interval on
average. With --run both times are medians of that run's newest checkpoints and steps. An async
checkpoint is timed until it is published; training waits for only a part of that time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.cli.common import positive_int, positive_number, run_path
from torchtitan_like.report.state import require_run, step_seconds
from torchtitan_like.report.tolerant import METRICS_KINDS, as_time, newest_events, newest_rows
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_problem
from torchtitan_like.util.run_directory import METRICS
from torchtitan_like.util.units import format_duration

FACTORS = (0.25, 0.5, 1, 2, 4)  # of the best interval
MAX_STEPS = 1e12  # of a best interval


class Times(NamedTuple):
    """Median times of a run, and the number of checkpoints and steps that were measured."""

    save_seconds: float
    step_seconds: float
    num_checkpoints: int
    num_steps: int


def measure_times(run: Path) -> Times:
    """Measure a run's newest full checkpoints and steps.

    Raises OSError, and ValueError if `run` is not a run or has too few.
    """
    require_run(run)
    saves = [
        seconds
        for event in newest_events(run)[0]
        if (event["event"], event.get("form")) == ("save", "full")
        and (seconds := as_time(event.get("seconds"))) is not None
    ]
    rows, _ = newest_rows(run / METRICS, ("step", "time"), METRICS_KINDS)
    steps = step_seconds(rows)
    if not (saves and steps):
        raise ValueError(
            f"{run} has {len(saves)} full checkpoints and {len(rows)} steps. Expected at least one "
            "checkpoint and two steps. Try again later, or give --save-seconds and --step-seconds."
        )
    return Times(statistics.median(saves), statistics.median(steps), len(saves), len(steps))


def interval_table(
    save_seconds: float, step_seconds: float, mtbf_seconds: float, interval: int | None
) -> list[str]:
    """Return the lines of the table. The formula of Young and Daly gives the best interval.

    interval: another one, in steps, to compare with. Raises ValueError for absurd times.
    """
    best_steps = math.sqrt(2 * save_seconds * mtbf_seconds) / step_seconds
    if best_steps > MAX_STEPS:
        raise ValueError(
            f"The best interval of {save_seconds:.3g} s per checkpoint, {step_seconds:.3g} s per "
            f"step and {mtbf_seconds:.3g} s between failures is {best_steps:.3g} steps. Expected "
            f"at most {MAX_STEPS:.0e}. Correct the times."
        )
    best = max(1, round(best_steps))
    candidates = {max(1, round(best_steps * factor)) for factor in FACTORS}
    if interval:
        candidates.add(interval)
    lines = [
        f"{'steps':>8} {'interval':>14} {'time saving':>12} {'lost per failure':>17} "
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


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=run_path, metavar="FOLDER", help="a run's folder, to measure both times in"
    )
    parser.add_argument(
        "--save-seconds", type=positive_number, metavar="S", help="of writing a checkpoint"
    )
    parser.add_argument(
        "--step-seconds", type=positive_number, metavar="S", help="of a training step"
    )
    parser.add_argument(
        "--mtbf-hours",
        type=positive_number,
        required=True,
        metavar="H",
        help="mean time between failures",
    )
    parser.add_argument(
        "--interval", type=positive_int, metavar="N", help="steps, to compare with the best"
    )
    options = parser.parse_args(arguments)
    if not options.run and not (options.save_seconds and options.step_seconds):
        parser.error("expected --save-seconds and --step-seconds, or --run")
    try:
        print("\n".join(_lines(options)))
    except (OSError, ValueError) as error:
        show_problem(error)
        return WRONG_INPUT
    return 0


def _lines(options: argparse.Namespace) -> list[str]:
    save, step, lines = options.save_seconds, options.step_seconds, []
    if options.run:
        times = measure_times(options.run)
        save, step = save or times.save_seconds, step or times.step_seconds
        lines.append(
            f"{save:.3g} s per checkpoint, {step:.3g} s per step, from {times.num_checkpoints:,} "
            f"checkpoints and {times.num_steps:,} steps of {options.run}"
        )
    return lines + interval_table(save, step, 3600 * options.mtbf_hours, options.interval)


if __name__ == "__main__":
    sys.exit(main())
