"""`titan plan compare`: predicted and measured memory and step time of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, add_json_flag, catch_value_errors, print_json
from torchtitan_like.util.output import show_error

OFF = 1


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a run (job.dump_folder)"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a plan file, written by titan plan -o (default: RUN/plan.json)",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Compares memory and step time of rank 0, from the newest attempt, and lists what each module\n"
        "keeps in memory. A run does so itself if X.plan.json is next to its X.toml. Reads files only.\n"
        "Returns 0 if all are within 10 % of the plan, 1 if not, and 2 if there is no plan of this\n"
        "configuration, or nothing to compare.\n\n"
        "example: titan plan compare outputs/llama3_8b"
    )


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. Returns the exit code."""
    return catch_value_errors(lambda: _compare(arguments))


def _compare(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.recorded import measured_modules, measured_steps, read_run
    from torchtitan_like.util.plan_file import (
        PLAN,
        TOLERANCE,
        check_modules,
        describe_differences,
        deviations,
        differences,
        event_fields,
        module_table,
        read_plan,
        settings_of,
    )
    from torchtitan_like.util.run_directory import read_config

    folder: Path = arguments.run
    recorded = read_run(folder)
    if not recorded.attempts:
        raise ValueError(f"{folder} has no attempts. Expected a run that has trained: name another")
    num_ranks = recorded.attempts[-1].num_ranks or 1
    path: Path = arguments.plan or folder / PLAN
    if not path.exists():
        raise ValueError(
            f"there is no plan {path}. Expected a plan file: write it with `titan plan "
            f"{folder}/config.toml --world-size {num_ranks} -o {folder / PLAN}`"
        )
    plan = read_plan(path)
    if found := differences(plan, settings_of(read_config(folder), num_ranks)):
        show_error(describe_differences(path, found))
        return FAILED
    modules = measured_modules(recorded)
    check_modules(modules)
    measured = measured_steps(recorded)
    compared = deviations(plan, measured)
    if not compared:
        show_error(
            f"{folder} has no measurement to compare. Expected a log line after step 10 of the "
            "newest attempt: train for longer, or lower metrics.log_freq"
        )
        return FAILED
    if arguments.json:
        both = {"planned_modules": plan.modules, "modules": modules}
        print_json({**event_fields(plan, measured), **both})
    else:
        print(f"Plan for {plan.gpu} ({path})")
        print("\n".join(map(str, compared)))
        if measured.reserved is None:
            print("Memory is not compared: the run did not measure a GPU's allocator")
        print("\n".join(module_table(plan.modules, modules)))
    return OFF if any(abs(each.share) > TOLERANCE for each in compared) else 0
