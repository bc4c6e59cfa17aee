"""`titan k8s init`: write the files of a Kubernetes job into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import positive_int, run_report

EXAMPLE = "titan k8s init k8s --name run1 --nodes 4 --image registry.example.org/titan:0.1.0"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--image", required=True, metavar="IMAGE", help="container image with this package"
    )
    parser.add_argument(
        "--name", default="train", metavar="NAME", help="name of the job; default: %(default)s"
    )
    parser.add_argument(
        "--nodes", type=positive_int, default=2, metavar="N", help="nodes; default: %(default)s"
    )
    parser.add_argument(
        "--gpus",
        type=positive_int,
        default=8,
        metavar="N",
        help="GPUs of each node; default: %(default)s",
    )
    parser.add_argument(
        "--config",
        default="llama3_8b.toml",
        metavar="CONFIG",
        help="bundled config, or a TOML file in the image or on the volume; default: %(default)s",
    )
    parser.epilog = (
        "Writes job.yaml (an Indexed Job, its headless Service and a NetworkPolicy), volume.yaml\n"
        "(the volume of the run folders) and sky.yaml (the same for SkyPilot), for you to edit.\n"
        "Overwrites nothing: returns 2 if one of the files exists. Then:\n"
        "  kubectl apply -f DIR/volume.yaml -f DIR/job.yaml\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the files. Returns the exit code."""
    from torchtitan_like.kubernetes.scaffold import JobFacts, write_job

    def action() -> int:
        facts = JobFacts(
            name=arguments.name,
            nodes=arguments.nodes,
            gpus=arguments.gpus,
            image=arguments.image,
            config=arguments.config,
        )
        for path in write_job(arguments.folder, facts):
            print(path)
        return 0

    return run_report(action)
