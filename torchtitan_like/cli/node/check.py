"""`titan node check`: check this machine, or all ranks of a job together."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import FAILED
from torchtitan_like.util.output import show_error

BAD = 1


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs that must be present")
    parser.add_argument(
        "--host-memory-gib", type=float, default=0, metavar="N", help="GiB that must be available"
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
        "--memory-gib", type=float, default=0, metavar="N", help="GiB that each rank allocates"
    )
    parser.add_argument("--backend", help="default: nccl on GPUs, else gloo")
    parser.add_argument(
        "--timeout",
        type=float,
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
        return FAILED
    report = check_machine(
        num_gpus=arguments.gpus,
        known_bad=known_bad,
        host_memory_gib=arguments.host_memory_gib,
        checks_pairs=not arguments.no_pairs,
        timeout=arguments.timeout,
    )
    print(report.line())
    return BAD if report.problems else 0
