"""Show what a pipeline schedule does with the ranks' time: an ASCII timeline and the bubble. Needs no ranks and no GPU.

    python scripts/pp_bubble.py --schedule 1F1B --pp 4 --microbatches 8
    python scripts/pp_bubble.py --pp 4 --microbatches 8                        # compare all schedules
    python scripts/pp_bubble.py --csv my_schedule.csv

A forward pass of one stage is the unit of time, a backward pass takes two, messages none. With one stage per rank, p
ranks and m micro-batches the bubble is (p - 1) / (m + p - 1). m = micro-batches of all gradient accumulation in a step.
"""

from __future__ import annotations

import argparse
import sys

from torchtitan_like.distributed.schedule_view import (
    few_micro_batches,
    order_of,
    read_csv,
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
    """One line per schedule; those with several stages per rank count time in stages that are as much smaller."""
    lines = [
        f"{pp} ranks, {num_micro_batches} micro-batches per step: the share of the ranks' time in which they wait"
    ]
    for name, schedule in NAMED.items():
        each = stages_on_a_rank(schedule, stages_per_rank)
        try:
            result = f"{simulate(order_of(name, pp, each, num_micro_batches)).bubble:6.1%}"
        except ValueError as error:
            result = f"     -  {error}"
        lines.append(f"{name:<22} {each} per rank {result}")
    return lines


def stages_on_a_rank(schedule: Schedule, wanted: int) -> int:
    """A schedule of several stages has the number that is wanted; a V has two."""
    if schedule.is_v_shaped:
        return 2
    return wanted if schedule.is_multi else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=NAMED, help="default: compare all of them")
    parser.add_argument("--pp", type=int, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, help="micro-batches of a step")
    parser.add_argument(
        "--stages-per-rank", type=int, default=2, help="of schedules that have several (default: 2)"
    )
    parser.add_argument("--csv", help="the file of a schedule, instead of --schedule")
    options = parser.parse_args(arguments)
    pp, number = options.pp, options.microbatches
    if not options.csv and (pp is None or number is None):
        parser.error("--pp and --microbatches are needed, or --csv")
    if not options.csv and min(pp, number, options.stages_per_rank) < 1:
        parser.error("--pp, --microbatches and --stages-per-rank are at least 1")
    try:
        if options.csv:
            lines = timeline_lines(options.csv, read_csv(options.csv))
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
