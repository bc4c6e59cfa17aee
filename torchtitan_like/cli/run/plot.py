"""`titan run plot`: draw metrics of one or several runs as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import catch_value_errors
from torchtitan_like.util.output import show_error


def configure_plot(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run (job.dump_folder)"
    )
    parser.add_argument(
        "--metric",
        action="append",
        dest="metrics",
        metavar="KEY",
        help="a key of metrics.jsonl, such as grad_norm or sources.web.loss; repeat it for several "
        "charts (default: loss)",
    )
    parser.add_argument(
        "--axis",
        choices=("step", "tokens", "hours"),
        default="step",
        help="the horizontal axis (default: step)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("plot.svg"),
        help="the .svg or .png file to write (default: plot.svg)",
    )
    parser.epilog = (
        "Several runs are drawn together. The chart of the loss also has its mean and the validation\n"
        "losses. Reads files only, also of a damaged or a live run. The same rows give the same bytes\n"
        "of an SVG file. Needs the extra `plot`. Returns 2 if a folder is not a run, or if no run has\n"
        "the metric.\n\n"
        "example: titan run plot outputs --metric loss -o loss.svg"
    )


def run_plot(arguments: argparse.Namespace) -> int:
    """Write the picture. Returns the exit code."""
    from torchtitan_like.util.pictures import check_picture

    def action() -> int:
        check_picture(arguments.output)
        from torchtitan_like.report.history import read_histories
        from torchtitan_like.report.plot import plot

        histories = read_histories(arguments.runs, is_redacted=False)
        for history in histories:
            for problem in history.run.problems:
                show_error(f"{history.run.name}: {problem}")
        plot(histories, arguments.metrics or ["loss"], arguments.axis, arguments.output)
        print(f"Wrote {arguments.output}")
        return 0

    return catch_value_errors(action)
