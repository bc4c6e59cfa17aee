"""`titan run ls`: list runs, their state and progress."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from torchtitan_like.cli.common import add_json_flag, catch_value_errors, print_json


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="the folder of a run, or one that contains runs; default: the current folder",
    )
    add_json_flag(parser)
    parser.epilog = (
        "State is one of:\n"
        "  running     a rank has moved within a minute, or within 5 typical steps\n"
        "  hung        no rank has, or a process on this machine is gone without an error\n"
        "  stopped     with the reason of exit.json; error: an error record; killed: all processes\n"
        "              on this machine are gone; lost: no sign for an hour\n"
        "  unreadable  a file is missing or damaged\n"
        "--json has details. Searches three levels of folders. Returns 2 if there is no run.\n\n"
        "example: titan run ls outputs"
    )


def run_ls(arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit code."""
    from torchtitan_like.report.runs import HEADER, list_runs

    def action() -> int:
        now = time.time()
        runs = list_runs(arguments.folder, now)
        if arguments.json:
            print_json([asdict(summary) for summary in runs])
        else:
            print("\n".join([HEADER, *(summary.format_row(now) for summary in runs)]))
        return 0

    return catch_value_errors(action)
