"""`titan run trace`: measure the profiler traces of all ranks, and merge them into one."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import positive_int, run_report
from torchtitan_like.util.output import show_error

EXAMPLE = "titan run trace outputs --step 100 -o trace.json.gz"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    parser.add_argument(
        "--step",
        type=positive_int,
        metavar="N",
        help="the step in the name of the traces' folder, iteration_N (default: the newest)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write one trace of all ranks: .json, or .json.gz (default: none)",
    )
    parser.epilog = (
        "Reads the traces of profiling.enable_profiling. Prints for each step and rank the time in\n"
        "which it computes, communicates without computing, waits for data, and is idle; the longest\n"
        "gaps, with their call stack if profiling.with_stack is on; and the rank for which the others\n"
        "wait. The clocks of the ranks are aligned by the ends of their collectives. Open the merged\n"
        "trace at ui.perfetto.dev. Needs the extra `trace`. Returns 2 if there are no traces.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write the merged trace. Returns the exit code."""

    def action() -> int:
        from torchtitan_like.report.trace.files import require_ijson
        from torchtitan_like.report.trace.table import analyze, trace_lines

        require_ijson()
        analysis = analyze(arguments.run, arguments.step, arguments.output)
        for problem in analysis.problems:
            show_error(problem)
        print("\n".join(trace_lines(analysis)))
        if arguments.output is not None:
            print(f"Wrote {arguments.output}")
        return 0

    return run_report(action)
