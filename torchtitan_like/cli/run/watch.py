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
    parser.add_argument(
        "run",
        type=Path,
        help="the folder of the run (job.dump_folder); with --web also a folder that contains runs",
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--every", type=float, default=5, metavar="SECONDS", help="between updates (default: 5)"
    )
    web = parser.add_argument_group("web")
    web.add_argument(
        "--web", action="store_true", help="serve live pages for a browser, until Ctrl-C"
    )
    web.add_argument("--port", type=int, default=8080, help="of the pages; 0: any (default: 8080)")
    web.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that the pages are served on (default: 127.0.0.1, only this machine)",
    )
    web.add_argument(
        "--no-token",
        action="store_true",
        help="let every user of this machine see and stop the runs",
    )
    parser.epilog = (
        "Prints step, loss, speed, memory, time left, disk space in checkpoints, and the position\n"
        "of each rank. Reads files only, so any machine with access to the folder can run it.\n"
        "Repeats until Ctrl-C. Returns 2 if the folder is not a run.\n\n"
        "With --web, prints a URL with a token and serves a list of all runs, a live page for\n"
        "each with buttons to save, export and stop, and /metrics for Prometheus. Needs the extra\n"
        "`report`.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the status, or serve it. Returns the exit code."""
    action = _serve if arguments.web else _print
    try:
        return run_report(lambda: action(arguments))
    except KeyboardInterrupt:
        return 0


def _serve(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.web.server import serve

    serve(
        arguments.run,
        host=arguments.host,
        port=arguments.port,
        needs_token=not arguments.no_token,
    )
    return 0


def _print(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.status import status_lines

    while True:
        lines = status_lines(arguments.run, time.time())
        clear = CLEAR_SCREEN if sys.stdout.isatty() and not arguments.once else ""
        print(clear + "\n".join(lines), flush=True)
        if arguments.once:
            return 0
        time.sleep(max(0.0, arguments.every))
