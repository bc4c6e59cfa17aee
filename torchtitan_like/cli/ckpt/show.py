"""`titan ckpt show`: print the manifest and the tensors of a checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torchtitan_like.cli.common import add_json_flag, run_checked


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="STEP",
        help="a step-N, a folder of safetensors or DCP, or a .pt file",
    )
    add_json_flag(parser)
    parser.epilog = (
        "Lists name, dtype and shape of every tensor.\n\n"
        "example: titan ckpt show outputs/checkpoint/step-100"
    )


def run_show(arguments: argparse.Namespace) -> int:
    """Print the contents. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.summary import format_summary, summarize

    def action() -> int:
        summary = summarize(arguments.checkpoint)
        text = (
            json.dumps(summary, indent=2) if arguments.json else "\n".join(format_summary(summary))
        )
        print(text)
        return 0

    return run_checked(action)
