"""`titan slurm after`: decide whether a job is queued again."""

from __future__ import annotations

import argparse

from torchtitan_like.cli.common import run_job


def configure_after(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=int, metavar="STEP", help="what `titan slurm before` printed")
    parser.add_argument("code", type=int, metavar="CODE", help="the exit code of srun")
    parser.epilog = (
        "train.slurm calls this command. Reads a resolved configuration from standard input.\n"
        "Prints the exit code of the job: the code in exit.json, or else 1. Returns 0 if the job is\n"
        "over, 75 if it should be queued again, 78 for wrong input, and 74 for an unreadable file.\n"
        "Variables: REQUEUE, MAX_STALLED_STARTS, SLURM_JOB_ID, SLURM_ARRAY_JOB_ID.\n\n"
        "example: titan slurm after 0 75 < outputs/config.toml"
    )


def run_after(arguments: argparse.Namespace) -> int:
    """Print the code of the job. Returns the exit code."""
    from torchtitan_like.slurm.job import after

    return run_job(lambda config: after(config, arguments.step, arguments.code))
