"""`titan k8s pod`: train in a pod of an Indexed Job."""

from __future__ import annotations

import argparse
import os

from torchtitan_like.cli.settings import HelpWithSettings, with_config

EXAMPLE = "titan k8s pod debug_model.toml --training.steps 2 --job.dump_folder runs/train"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="the TOML file")
    parser.add_argument("-h", "--help", action=HelpWithSettings)
    parser.epilog = (
        "job.yaml runs this command in every pod. It is `titan train` with the node rank in\n"
        "JOB_COMPLETION_INDEX; all other options of the launch are environment variables.\n"
        "Returns 0 when the run is done, 75 if this start has saved a new checkpoint and the job\n"
        "should start again, 1, 69 or 74 if it should but has not, and other codes as\n"
        "`titan train`.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit code of the pod."""
    from torchtitan_like.kubernetes.pod import run_pod
    from torchtitan_like.util.output import show

    settings = with_config(arguments.config, arguments.settings, show)
    return run_pod(settings, arguments.words, os.environ)
