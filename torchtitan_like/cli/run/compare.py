"""`titan run compare`: find the first step at which two runs differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import add_json_flag, catch_value_errors, print_json

DIFFERENT = 1


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "a", type=Path, metavar="A", help="the folder of a run, or its metrics.jsonl"
    )
    parser.add_argument("b", type=Path, metavar="B", help="the other run")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--data-only", action="store_true", help="compare the data of each step, not its results"
    )
    mode.add_argument(
        "--environment",
        action="store_true",
        help="compare variables, packages, machine and git state of the newest attempts. "
        "A and B may also be folders of attempts",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Compares keys that a layout or a restart must not change, to the last bit. For loss and\n"
        "gradient norm it also prints the largest relative difference. Returns 0 if all steps in\n"
        "both runs are equal, 1 if not, and 2 if there is nothing to compare.\n\n"
        "example: titan run compare outputs_a outputs_b"
    )


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. Returns the exit code."""
    action = _compare_environments if arguments.environment else _compare_metrics
    return catch_value_errors(lambda: action(arguments))


def _compare_metrics(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.compare import compare_runs

    comparison = compare_runs(arguments.a, arguments.b, data_only=arguments.data_only)
    if arguments.json:
        print_json(comparison.as_json())
    else:
        print("\n".join(comparison.lines()))
    return 0 if comparison.is_equal else DIFFERENT


def _compare_environments(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.compare import compare_environments, format_environments

    differences = compare_environments(arguments.a, arguments.b)
    is_equal = not any(differences.values())
    if arguments.json:
        print_json({"equal": is_equal, "files": differences})
    else:
        print("\n".join(format_environments(arguments.a, arguments.b, differences)))
    return 0 if is_equal else DIFFERENT
