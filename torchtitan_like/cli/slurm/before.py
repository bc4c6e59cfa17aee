"""`titan slurm before`: decide whether a job still has steps to train."""

from __future__ import annotations

import argparse

from torchtitan_like.cli.common import run_job


def configure_before(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "train.slurm calls this command. Reads a resolved configuration from standard input.\n"
        "Prints the step to continue from (0: a new run), or `none` if the last step is done or\n"
        "the kill switch exists. Removes the exit.json of an earlier attempt. Returns 0, 78 for\n"
        "wrong input, or 74 for an unreadable file.\n\n"
        "example: titan slurm before < outputs/config.toml"
    )


def run_before(arguments: argparse.Namespace) -> int:
    """Print the step. Returns the exit code."""
    from torchtitan_like.slurm.job import before

    return run_job(lambda config: before(config))
