"""The options `--gpu` and `--cluster` of commands that plan a run."""

from __future__ import annotations

import argparse

from torchtitan_like.plan.clusters import (
    DEFAULT_CLUSTER,
    Cluster,
    load_cluster,
    typical_cluster,
)
from torchtitan_like.plan.gpus import DEFAULT_GPU, Gpu, load_gpu


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add both options."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="a GPU by name, or a TOML file that describes one (default: the cluster's, else "
        f"{DEFAULT_GPU})",
    )
    parser.add_argument(
        "--cluster",
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="a cluster by name, or a TOML file that describes one, for the step time "
        f"(default: {DEFAULT_CLUSTER})",
    )


def load_hardware(arguments: argparse.Namespace) -> tuple[Gpu, Cluster]:
    """Read both descriptions. Raises ValueError that names the option."""
    try:
        cluster = load_cluster(arguments.cluster)
    except ValueError as error:
        raise ValueError(f"--cluster: {error}") from None
    try:
        gpu = load_gpu(arguments.gpu or cluster.gpu or DEFAULT_GPU)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from None
    return gpu, typical_cluster(gpu.key) if arguments.cluster == DEFAULT_CLUSTER else cluster
