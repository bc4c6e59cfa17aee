"""`titan node`: check and measure machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import (
    end_rank,
    non_negative_int,
    non_negative_number,
    parse_value,
    positive_int,
    positive_number,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_error

BAD = 1


# ---- titan node check


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--gpus", type=non_negative_int, metavar="N", help="number of GPUs that must be present"
    )
    parser.add_argument(
        "--host-memory-gib",
        type=non_negative_number,
        default=0,
        metavar="N",
        help="GiB that must be available",
    )
    parser.add_argument(
        "--known-bad", type=Path, metavar="FILE", help="file of GPU UUIDs that must not be used"
    )
    parser.add_argument(
        "--no-pairs", action="store_true", help="skip the all-reduce of every pair of GPUs"
    )
    parser.add_argument(
        "--ranks", action="store_true", help="under a launcher: check all ranks together"
    )
    parser.add_argument(
        "--memory-gib",
        type=non_negative_number,
        default=0,
        metavar="N",
        help="GiB that each rank allocates",
    )
    parser.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=60,
        metavar="SECONDS",
        help="for ranks to find each other (default: 60)",
    )
    parser.epilog = (
        "Prints `<host> is OK` and returns 0, or `<host> is BAD: ...` and returns 1. Checks\n"
        "number of GPUs, uncorrected memory errors, pending row remaps, slowdown by hardware,\n"
        "temperature, Xid errors in the kernel log, and every pair of GPUs.\n"
        "With --ranks every rank prints its device and cores, or what is broken:\n"
        "  torchrun --nproc_per_node=8 --no-python titan node check --ranks\n"
        "  srun --ntasks-per-node 8 titan node check --ranks  (MASTER_ADDR: the first host)\n\n"
        "example: titan node check --gpus 0"
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Check the machine or the ranks. Returns the exit code."""
    if arguments.ranks:
        from torchtitan_like.node.ranks import check_ranks
        from torchtitan_like.resilience.end import end_process

        is_ok = check_ranks(arguments.backend, arguments.timeout, arguments.memory_gib)
        end_process(0 if is_ok else BAD)

    from torchtitan_like.node.machine import check_machine

    try:
        known_bad = set(arguments.known_bad.read_text().split()) if arguments.known_bad else set()
    except OSError as error:
        show_error(
            f"{arguments.known_bad} cannot be read: {error.strerror}. "
            "Expected one GPU UUID per line. Correct --known-bad."
        )
        return WRONG_INPUT
    report = check_machine(
        num_gpus=arguments.gpus,
        known_bad=known_bad,
        host_memory_gib=arguments.host_memory_gib,
        checks_pairs=not arguments.no_pairs,
        timeout=arguments.timeout,
    )
    print(report.line())
    return BAD if report.problems else 0


# ---- titan node bench


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="bytes of each rank's float32 tensor, as 32KB,1MiB,4GB; default: 64KB to 4GB, or to "
        "64MB without GPUs",
    )
    parser.add_argument(
        "--advertised",
        type=positive_number,
        metavar="GBPS",
        help="GB/s of a link in one direction",
    )
    parser.add_argument(
        "--parts", type=positive_int, metavar="N", help="also send each size as N tensors"
    )
    parser.add_argument(
        "--flags", action="store_true", help="also compare two ways to agree on a yes or no"
    )
    parser.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    parser.add_argument("--warmup", type=non_negative_int, metavar="N", help="(default: 3)")
    parser.add_argument("--repeat", type=positive_int, metavar="N", help="(default: 10)")
    parser.epilog = (
        "Start one process per GPU:\n"
        "  torchrun --nproc_per_node=8 --no-python titan node bench --advertised 450\n"
        "  srun --ntasks-per-node 8 titan node bench    (MASTER_ADDR names the first host)\n"
        "algbw is bytes / time. busbw is algbw x 2 (n - 1) / n for n ranks: the load of each link.\n"
        "Compare busbw with --advertised; 80 % of it is usual for large tensors. FSDP sends the\n"
        "weights of one block at a time, so measure at that size.\n\n"
        "example: titan node bench --sizes 32KB,1MB --repeat 3"
    )


def _sizes(text: str) -> list[int]:
    """Parse a list of sizes. Raises argparse.ArgumentTypeError."""
    from torchtitan_like.node.bench import parse_size

    expected = "numbers with KB, MB, GB, KiB, MiB, GiB or nothing, and commas between them"
    return parse_value(text, lambda sizes: list(map(parse_size, sizes.split(","))), bool, expected)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure the network. Returns the exit code."""
    from torchtitan_like.node.bench import run_bench

    run_bench(
        arguments.sizes,
        advertised=arguments.advertised,
        num_tensors=arguments.parts or 1,
        measures_flags=arguments.flags,
        backend=arguments.backend,
        warmup=3 if arguments.warmup is None else arguments.warmup,
        repeat=arguments.repeat or 10,
    )
    return end_rank(0)
