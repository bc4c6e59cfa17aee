"""`titan plan`: list the layouts of a model that fit on a cluster, the fastest ones first."""

from __future__ import annotations

import argparse

from torchtitan_like.cli.common import FAILED, positive_int, positive_number
from torchtitan_like.plan.layouts import NETS
from torchtitan_like.util.output import show_error

NOTHING_FITS = 1
EXAMPLE = "titan plan --params 8e9 --gpus 16 --nodes 2 --gpu-mem 80 --net fast"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--params", type=positive_number, required=True, metavar="N", help="parameters, e.g. 8e9"
    )
    parser.add_argument(
        "--gpus", type=positive_int, required=True, metavar="N", help="GPUs of all machines"
    )
    parser.add_argument(
        "--nodes", type=positive_int, default=1, metavar="N", help="machines (default: 1)"
    )
    parser.add_argument(
        "--gpu-mem",
        type=positive_number,
        default=80,
        metavar="GIB",
        help="memory of a GPU, GiB (default: 80)",
    )
    parser.add_argument(
        "--host-mem",
        type=float,
        default=1024,
        metavar="GIB",
        help="main memory of a machine, GiB (default: 1024)",
    )
    parser.add_argument(
        "--net",
        choices=NETS,
        default="fast",
        help="between machines: 8 x 400 Gbit/s of each, or 100 Gbit/s (default: fast)",
    )
    parser.add_argument(
        "--seq-len",
        type=positive_int,
        default=8192,
        metavar="N",
        help="tokens of a sample (default: 8192)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        default=2**20,
        metavar="N",
        help="tokens of a step, about (default: 1,048,576)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=400,
        metavar="N",
        help="TFLOP/s that a GPU reaches (default: 400, which is 40 %% of an H100's 989)",
    )
    parser.epilog = (
        "Prints the layouts that fit, fastest first, with their memory by parts, and the config\n"
        "lines of the first ones. The times only order the layouts and are not a forecast.\n"
        "Needs no GPU. Returns 0, 1 if no layout fits, 2 for wrong arguments.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    from torchtitan_like.plan.layouts import Cluster, model_of
    from torchtitan_like.plan.report import report
    from torchtitan_like.plan.search import global_batch, suggest

    if arguments.gpus % arguments.nodes:
        show_error(
            f"--gpus {arguments.gpus} is not a multiple of --nodes {arguments.nodes}. Expected "
            "equally many GPUs on each machine: change one of them"
        )
        return FAILED
    model = model_of(arguments.params)
    cluster = Cluster(
        arguments.gpus,
        arguments.nodes,
        arguments.gpu_mem,
        NETS[arguments.net],
        arguments.tflops * 1e12,
        arguments.host_mem,
    )
    batch = global_batch(arguments.tokens_per_step, arguments.seq_len, arguments.gpus)
    suggestions = suggest(model, cluster, batch, arguments.seq_len)
    print("\n".join(report(model, cluster, batch, arguments.seq_len, suggestions)))
    return 0 if suggestions else NOTHING_FITS
