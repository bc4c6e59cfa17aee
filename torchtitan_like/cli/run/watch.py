"""`titan run watch`: show the progress of a run and the position of its ranks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from torchtitan_like.cli.common import run_report

EXAMPLE = "titan run watch outputs --once"
CLEAR_SCREEN = "\033[2J\033[H"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--every", type=float, default=5, metavar="SECONDS", help="between updates (default: 5)"
    )
    parser.epilog = (
        "Prints step, loss, speed, memory, time left, disk space in checkpoints, and the position\n"
        "of each rank. Reads files only, so any machine with access to the folder can run it.\n"
        "Repeats until Ctrl-C. Returns 2 if the folder is not a run.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Returns the exit code."""
    from torchtitan_like.report.status import status_lines

    def action() -> int:
        while True:
            lines = status_lines(arguments.run, time.time())
            clear = CLEAR_SCREEN if sys.stdout.isatty() and not arguments.once else ""
            print(clear + "\n".join(lines), flush=True)
            if arguments.once:
                return 0
            time.sleep(max(0.0, arguments.every))

    try:
        return run_report(action)
    except KeyboardInterrupt:
        return 0
