"""`titan slurm before`: decide whether a job still has steps to train."""

from __future__ import annotations

import argparse
import sys

EXAMPLE = "titan slurm before < outputs/config.toml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "train.slurm calls this command. Reads a resolved configuration from standard input.\n"
        "Prints the step to continue from (0: a new run), or `none` if the last step is done or\n"
        "the kill switch exists. Removes the exit.json of an earlier attempt.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the step. Returns the exit code."""
    from torchtitan_like.slurm.job import before, parse_config

    return before(parse_config(sys.stdin.read()))
