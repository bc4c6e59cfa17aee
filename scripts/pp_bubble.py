"""Print the timeline of a pipeline schedule and its bubble. Needs no ranks and no GPU.

    python scripts/pp_bubble.py --schedule 1F1B --pp 4 --microbatches 8
    python scripts/pp_bubble.py --pp 4 --microbatches 8                        # compare all schedules
    python scripts/pp_bubble.py --csv my_schedule.csv

The unit of time is a forward pass of one stage. A backward pass takes two units, messages take no
time. With one stage per rank, p ranks and m micro-batches in a step, the bubble is (p - 1) / (m + p
- 1). m includes gradient accumulation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchtitan_like.distributed.schedule_view import (
    few_micro_batches,
    order_of,
    parse_csv,
    simulate,
    timeline_lines,
)
from torchtitan_like.distributed.stages import SCHEDULES, Schedule

NAMED = {
    name: schedule
    for name, schedule in SCHEDULES.items()
    if not name.startswith("PipelineSchedule")
}


def comparison(pp: int, stages_per_rank: int, num_micro_batches: int) -> list[str]:
    """Return one line per schedule, with the bubble as a fraction of the ranks' time."""
    lines = [
        f"{pp} ranks, {num_micro_batches} micro-batches per step: the fraction of the ranks' time that they are idle"
    ]
    for name, schedule in NAMED.items():
        each = stages_on_a_rank(schedule, stages_per_rank)
        try:
            result = f"{simulate(order_of(name, pp, each, num_micro_batches)).bubble:6.1%}"
        except ValueError as error:
            result = f"     -  {error}"
        lines.append(f"{name:<22} {each} per rank {result}")
    return lines


def stages_on_a_rank(schedule: Schedule, stages_per_rank: int) -> int:
    """Return the number of stages per rank: 1, 2 for a V schedule, else `stages_per_rank`."""
    if schedule.is_v_shaped:
        return 2
    return stages_per_rank if schedule.is_multi else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=NAMED, help="default: compare all of them")
    parser.add_argument("--pp", type=int, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, help="micro-batches of a step")
    parser.add_argument(
        "--stages-per-rank",
        type=int,
        default=2,
        help="for schedules with several stages per rank (default: 2)",
    )
    parser.add_argument("--csv", help="CSV file of a schedule, instead of --schedule")
    options = parser.parse_args(arguments)
    pp, number = options.pp, options.microbatches
    if not options.csv and (pp is None or number is None):
        parser.error("expected --pp and --microbatches, or --csv")
    if not options.csv and min(pp, number, options.stages_per_rank) < 1:
        parser.error("--pp, --microbatches and --stages-per-rank must be at least 1")
    try:
        if options.csv:
            lines = timeline_lines(options.csv, parse_csv(Path(options.csv).read_text()))
        elif options.schedule:
            each = stages_on_a_rank(NAMED[options.schedule], options.stages_per_rank)
            lines = timeline_lines(options.schedule, order_of(options.schedule, pp, each, number))
        else:
            lines = comparison(pp, options.stages_per_rank, number)
            lines += [few_micro_batches(number, pp)] if number < pp else []
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
