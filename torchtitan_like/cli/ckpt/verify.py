"""`titan ckpt verify`: read checkpoints and compare every byte with the stored hashes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torchtitan_like.cli.common import DAMAGED, add_json_flag, run_checked


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", type=Path, help="a step-N, or a folder with several")
    add_json_flag(parser)
    parser.epilog = (
        "Progress goes to stderr. Exit codes: 0 everything is intact, 1 damage was detected,\n"
        "2 nothing could be verified.\n\n"
        "example: titan ckpt verify outputs/checkpoint"
    )


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify one step or all steps of a folder. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.verify import find_steps, verify

    def action() -> int:
        results = []
        for step in find_steps(arguments.path):
            results.append(verify(step))
            if not arguments.json:
                print("\n".join(results[-1].lines()), flush=True)
        if arguments.json:
            print(json.dumps([result.as_json() for result in results], indent=2))
        return DAMAGED if any(result.damage for result in results) else 0

    return run_checked(action)
