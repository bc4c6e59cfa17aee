"""`titan slurm`: write batch scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import run_checked

# ---- titan slurm init


def configure_init(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder for the scripts, which all nodes must see"
    )
    parser.epilog = (
        "Writes train.slurm, job arrays and chains, watchdog, cron and node checks, for you to\n"
        "edit. Each explains itself with --help. env.sh makes `titan` available to all of them.\n"
        "Overwrites nothing: returns 2 if one of the files exists. Then:\n"
        "  sbatch --nodes=8 --gpus-per-node=8 DIR/train.slurm --job.config_file X.toml\n\n"
        "example: titan slurm init slurm"
    )


def run_init(arguments: argparse.Namespace) -> int:
    """Write the scripts. Returns the exit code."""
    from torchtitan_like.slurm.templates import write_scripts

    def action() -> int:
        for path in write_scripts(arguments.folder):
            print(path)
        return 0

    return run_checked(action, ValueError)
