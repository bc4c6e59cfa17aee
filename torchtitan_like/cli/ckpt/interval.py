"""`titan ckpt interval`: find the best interval between two checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import catch_value_errors, positive_int, positive_number


def configure_interval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a run's folder, to measure both times in"
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
    parser.epilog = (
        "Prints what checkpoints and failures cost for several intervals. The best one is\n"
        "sqrt(2 C M) seconds, with C seconds a checkpoint and M seconds between failures: Young,\n"
        "CACM 17(9), 1974; Daly, FGCS 22(3), 2006. A failure loses half an interval on average.\n"
        "With --run both times are medians of that run's newest checkpoints and steps. An async\n"
        "checkpoint is timed until it is published; training waits for only a part of that time.\n\n"
        "example: titan ckpt interval --save-seconds 40 --step-seconds 2.5 --mtbf-hours 12"
    )


def run_interval(arguments: argparse.Namespace) -> int:
    """Print the table. Returns the exit code."""
    from torchtitan_like.report.interval import interval_table, measure_times

    def action() -> int:
        save, step = arguments.save_seconds, arguments.step_seconds
        if arguments.run:
            times = measure_times(arguments.run)
            save, step = save or times.save_seconds, step or times.step_seconds
            print(
                f"{save:.3g} s per checkpoint, {step:.3g} s per step, from "
                f"{times.num_checkpoints:,} checkpoints and {times.num_steps:,} steps of "
                f"{arguments.run}"
            )
        if not (save and step):
            raise ValueError(
                "The times of a checkpoint and of a step are unknown. Expected --save-seconds and "
                "--step-seconds, or --run: add them"
            )
        lines = interval_table(save, step, 3600 * arguments.mtbf_hours, arguments.interval)
        print("\n".join(lines))
        return 0

    return catch_value_errors(action)
