"""`titan run report`: write a page about one or several runs, or print its numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import add_json_flag, print_json, run_report

EXAMPLE = "titan run report outputs -o report.html"
DEFAULT_PAGE = Path("report.html")


def configure(parser: argparse.ArgumentParser) -> None:
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
    add_json_flag(parser)
    parser.epilog = (
        "The page is one file that needs no network: goodput, curves with all events, attempts,\n"
        "checkpoints, settings, warnings and the last error. Several runs are drawn together.\n"
        "Reads files only, also of a damaged or a live run. Needs the extra `report`; --json does\n"
        "not. Returns 2 if a folder is not a run.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page or print the numbers. Returns the exit code."""
    from torchtitan_like.report.figures import require_bokeh
    from torchtitan_like.report.history import read_histories
    from torchtitan_like.report.summary import compare, summarize
    from torchtitan_like.util.files import write_atomically
    from torchtitan_like.util.units import format_bytes

    page: Path | None = arguments.output
    if page is None and not arguments.json:
        page = DEFAULT_PAGE

    def action() -> int:
        if page is not None:
            require_bokeh()
        histories = read_histories(arguments.runs, is_redacted=arguments.redact)
        if page is not None:
            from torchtitan_like.report.page import render_page

            text = render_page(histories, is_redacted=arguments.redact)
            html = text.encode(errors="replace")
            write_atomically(page, html)
        if arguments.json:
            numbers = [summarize(history) for history in histories]
            print_json({"runs": numbers, "comparison": compare(histories)})
        else:
            print(f"Wrote {page} ({format_bytes(len(html))})")
        return 0

    return run_report(action)
