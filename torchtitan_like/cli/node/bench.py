"""`titan node bench`: measure how fast ranks all-reduce."""

from __future__ import annotations

import argparse

from torchtitan_like.cli.common import FAILED, end_rank
from torchtitan_like.util.output import show_error


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--sizes",
        metavar="LIST",
        help="bytes of each rank's float32 tensor, as 32KB,1MiB,4GB; default: 64KB to 4GB, or to "
        "64MB without GPUs",
    )
    parser.add_argument(
        "--advertised", type=float, metavar="GBPS", help="GB/s of a link in one direction"
    )
    parser.add_argument(
        "--parts", type=int, default=1, metavar="N", help="also send each size as N tensors"
    )
    parser.add_argument(
        "--flags", action="store_true", help="also compare two ways to agree on a yes or no"
    )
    parser.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="(default: 10)")
    parser.epilog = (
        "algbw is bytes / time. busbw is algbw x 2 (n - 1) / n for n ranks: the load of each link.\n"
        "Compare busbw with --advertised; 80 % of it is usual for large tensors. FSDP sends the\n"
        "weights of one block at a time, so measure at that size. Start one process per GPU:\n"
        "  torchrun --nproc_per_node=8 --no-python titan node bench --advertised 450\n"
        "  srun --ntasks-per-node 8 titan node bench    (MASTER_ADDR names the first host)\n\n"
        "example: titan node bench --sizes 32KB,1MB --repeat 3"
    )


def run_bench(arguments: argparse.Namespace) -> int:
    """Print the table. Returns the exit code."""
    from torchtitan_like.node.bench import parse_size, run_bench

    sizes = None
    if arguments.sizes:
        try:
            sizes = [parse_size(text) for text in arguments.sizes.split(",")]
        except ValueError as error:
            show_error(str(error))
            return FAILED
    run_bench(
        sizes,
        advertised=arguments.advertised,
        num_tensors=arguments.parts,
        measures_flags=arguments.flags,
        backend=arguments.backend,
        warmup=arguments.warmup,
        repeat=arguments.repeat,
    )
    return end_rank(0)
