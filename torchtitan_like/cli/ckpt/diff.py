"""`titan ckpt diff`: compare two checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED, add_model_flags, run_checked


def configure_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("a", type=Path, metavar="A", help="a checkpoint of any format")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    add_model_flags(parser)
    parser.epilog = (
        "Lists different settings, names, shapes, dtypes, numbers and objects. Of checkpoints in\n"
        "formats with different names it compares the weights.\n"
        "Exit codes: 0 they are equal, 1 they differ, 2 they could not be compared.\n\n"
        "example: titan ckpt diff outputs/checkpoint/step-50 outputs/checkpoint/step-100"
    )


def run_diff(arguments: argparse.Namespace) -> int:
    """Print the differences. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.compare import compare_checkpoints
    from torchtitan_like.stored_config import identify_checkpoint

    def action() -> int:
        lines, summary = compare_checkpoints(
            arguments.a,
            arguments.b,
            lambda path: identify_checkpoint(path, arguments.config, arguments.custom_import),
        )
        print("\n".join([*lines, summary]))
        return 1 if lines else 0

    return run_checked(action, damage_code=FAILED)
