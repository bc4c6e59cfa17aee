"""`titan ckpt ls`: list the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from torchtitan_like.cli.common import add_json_flag, run_checked


def configure_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, help="the checkpoint folder of a run")
    add_json_flag(parser)
    parser.epilog = (
        "Shows name, kind, size, age and notes of every checkpoint and Hugging Face export, also\n"
        "of unfinished, superseded and damaged ones. Sizes are compared with the manifest.\n"
        "titan ckpt verify reads every byte.\n\n"
        "example: titan ckpt ls outputs/checkpoint"
    )


def run_ls(arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.listing import format_entries, list_checkpoints

    def action() -> int:
        entries = list_checkpoints(arguments.folder)
        if arguments.json:
            print(json.dumps([asdict(entry) for entry in entries], indent=2))
        else:
            print("\n".join(format_entries(entries)))
        return 0

    return run_checked(action)
