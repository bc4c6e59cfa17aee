"""`titan run stop`: save and end a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import catch_value_errors


def configure_stop(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    parser.add_argument("--clear", action="store_true", help="allow runs in this folder again")
    parser.epilog = (
        "Creates the file of resilience.kill_switch_path (KILL). The run saves and ends with code\n"
        "130 within its next steps. Queued jobs of this run end at once while the file exists.\n\n"
        "example: titan run stop outputs"
    )


def run_stop(arguments: argparse.Namespace) -> int:
    """Create or remove the kill switch. Returns the exit code."""
    from torchtitan_like.report.requests import clear_stop, request_stop

    def action() -> int:
        print(clear_stop(arguments.run) if arguments.clear else request_stop(arguments.run))
        return 0

    return catch_value_errors(action)
