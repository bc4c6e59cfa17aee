"""`titan run watch`: show the progress of a run and the position of its ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_like.cli.common import run_report

EXAMPLE = "titan run watch outputs --once"


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
        "Shows step, loss, speed, memory, time left, disk space in checkpoints, the position of each\n"
        "rank; in a terminal also a progress bar, the curve of the loss and the last events. Reads\n"
        "files only, so any machine with access to the folder can run it. Updates until the run has\n"
        "ended, or until Ctrl-C. Returns 2 if the folder is not a run.\n\n"
        "With --web, prints a URL with a token and serves a list of all runs, a live page for\n"
        "each with buttons to save, export and stop, and /metrics for Prometheus. Needs the extra\n"
        "`report`.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the status, or serve it. Returns the exit code."""
    action = _serve if arguments.web else _show
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


def _show(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.status import has_ended

    with _display(arguments.run) as show:
        while True:
            is_last = arguments.once or has_ended(arguments.run)
            show()
            if is_last:
                return 0
            time.sleep(max(0.0, arguments.every))


@contextmanager
def _display(run: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the status: in place in a terminal, else as plain lines."""
    if not sys.stdout.isatty():
        from torchtitan_like.report.status import status_lines

        yield lambda: print("\n".join(status_lines(run, time.time())), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    from torchtitan_like.report.terminal import status_view

    console = Console(file=getattr(sys.stdout, "unescaped", sys.stdout))
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield lambda: live.update(status_view(run, time.time()), refresh=True)
