"""`titan run save`: let a run save a checkpoint now, and continue."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import catch_value_errors


def configure_save(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    parser.add_argument(
        "--export", action="store_true", help="write a Hugging Face export, not a checkpoint"
    )
    parser.epilog = (
        "Creates the file of resilience.save_switch_path (SAVE), or EXPORT. The run removes it\n"
        "and saves within its next steps. Returns 2 if the run has ended or checkpoints are\n"
        "disabled.\n\n"
        "example: titan run save outputs"
    )


def run_save(arguments: argparse.Namespace) -> int:
    """Create the switch file. Returns the exit code."""
    from torchtitan_like.report.requests import request_save

    def action() -> int:
        print(request_save(arguments.run, export=arguments.export))
        return 0

    return catch_value_errors(action)
