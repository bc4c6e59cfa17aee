"""`titan run report`: write a page about one or several runs, or print its numbers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    add_json_flag,
    catch_value_errors,
    positive_number,
    print_json,
)

if TYPE_CHECKING:
    from torchtitan_like.report.history import History

DEFAULT_PAGE = Path("report.html")


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run (job.dump_folder)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the HTML file to write (default: {DEFAULT_PAGE}; none with --json)",
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="leave out environment, paths, host names and log text",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--every",
        type=positive_number,
        metavar="SECONDS",
        help="write the page again until all runs have ended; it reloads itself in the browser",
    )
    add_json_flag(mode)
    parser.epilog = (
        "The page is one file that needs no network: goodput, curves with all events, attempts,\n"
        "checkpoints, settings, warnings and the last error. Several runs are drawn together.\n"
        "Reads files only, also of a damaged or a live run. --every ends when each run has an\n"
        "exit.json, or with Ctrl-C. Needs the extra `report`; --json does not. Returns 2 if a\n"
        "folder is not a run.\n\n"
        "example: titan run report outputs -o report.html"
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page or print the numbers. Returns the exit code."""
    action = _print_numbers if arguments.json else _write_pages
    try:
        return catch_value_errors(lambda: action(arguments))
    except KeyboardInterrupt:
        return 0


def _print_numbers(arguments: argparse.Namespace) -> int:
    from torchtitan_like.report.figures import require_bokeh
    from torchtitan_like.report.history import read_histories
    from torchtitan_like.report.summary import compare, summarize

    page: Path | None = arguments.output
    if page is not None:
        require_bokeh()
    histories = read_histories(arguments.runs, is_redacted=arguments.redact)
    if page is not None:
        _write_page(page, histories, is_redacted=arguments.redact)
    numbers = [summarize(history) for history in histories]
    print_json({"runs": numbers, "comparison": compare(histories)})
    return 0


def _write_pages(arguments: argparse.Namespace) -> int:
    """Write the page once, or every some seconds until all runs have ended."""
    from torchtitan_like.report.figures import require_bokeh
    from torchtitan_like.report.history import read_histories
    from torchtitan_like.report.status import has_ended
    from torchtitan_like.util.units import format_bytes

    require_bokeh()
    page = arguments.output or DEFAULT_PAGE
    is_first = True
    while True:
        is_last = arguments.every is None or all(map(has_ended, arguments.runs))
        refresh_seconds = None if is_last else arguments.every
        histories = read_histories(arguments.runs, is_redacted=arguments.redact)
        num_bytes = _write_page(
            page, histories, is_redacted=arguments.redact, refresh_seconds=refresh_seconds
        )
        if is_first or is_last:
            print(f"Wrote {page} ({format_bytes(num_bytes)})", flush=True)
        if is_last:
            return 0
        is_first = False
        time.sleep(arguments.every)


def _write_page(
    page: Path,
    histories: Sequence[History],
    *,
    is_redacted: bool,
    refresh_seconds: float | None = None,
) -> int:
    """Replace the page. Returns its number of bytes."""
    from torchtitan_like.report.page import render_page
    from torchtitan_like.util.files import write_atomically

    text = render_page(histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds)
    html = text.encode(errors="replace")
    write_atomically(page, html)
    return len(html)
