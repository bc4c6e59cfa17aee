"""`titan run watch`: show the progress of a run and the position of its ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_like.cli.common import catch_value_errors


def configure_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--every", type=float, default=5, metavar="SECONDS", help="between updates (default: 5)"
    )
    parser.epilog = (
        "Shows step, loss, speed, memory, time left, disk space in checkpoints, the position of each\n"
        "rank; in a terminal also a progress bar, the curve of the loss and the last events. Reads\n"
        "files only, so any machine with access to the folder can run it. Updates until the run has\n"
        "ended, or until Ctrl-C. Returns 2 if the folder is not a run.\n\n"
        "example: titan run watch outputs --once"
    )


def run_watch(arguments: argparse.Namespace) -> int:
    """Show the status. Returns the exit code."""
    try:
        return catch_value_errors(lambda: _show(arguments))
    except KeyboardInterrupt:
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
