"""Does a step wait for the network, or for the GPUs? Before there is a cluster, from a few numbers.

    python scripts/comm_compute.py --params 80e9 --gpus 512 --tflops 250 --gbs 42.5 --seq-len 1024 --batch 3584 --recompute
    python scripts/comm_compute.py --params 8e9 --gpus 64 --tflops 400 --gbs 200 --seq-len 8192 --batch 128 --sharding ddp

    communication = transmissions x bytes x params / (GB/s)
    compute       = passes x 2 x params x seq_len x batch / (gpus x FLOP/s)

Transmissions: ddp and zero1 send gradients and get sums (2); zero2 (reshard_after_forward = "never") does that for every
micro-batch; zero3 (FSDP) gathers weights twice and sends gradients (3), for every micro-batch too. Passes: forward 1, backward
2, and once more forward with full activation checkpointing (--recompute). Of attention only its weights are counted, as in
6 N D (Kaplan et al., Scaling laws for neural language models, arXiv 2001.08361, section 2.1).

--gbs is what the network really carries for each rank in one direction: busbw of `titan node bench` (1 GB/s is 8
Gbit/s). The shorter of the two can at best hide behind the longer. `titan plan` compares whole layouts.
"""

from __future__ import annotations

import argparse
import sys

TRANSMISSIONS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
EVERY_MICRO_BATCH = ("zero2", "zero3")


def gigabytes(params: float, sharding: str, bytes_each: float, micro_batches: int) -> float:
    """What a rank sends in a step, in GB of 1000^3 bytes."""
    times = micro_batches if sharding in EVERY_MICRO_BATCH else 1
    return TRANSMISSIONS[sharding] * times * bytes_each * params / 1e9


def tflop(params: float, tokens: float, recompute: bool) -> float:
    """What all ranks compute in a step of ``tokens``, in units of 10^12."""
    return (4 if recompute else 3) * 2 * params * tokens / 1e12


def report(options: argparse.Namespace) -> list[str]:
    """Both times with their formulas, and which of them a step waits for."""
    sent = gigabytes(options.params, options.sharding, options.bytes, options.micro_batches)
    work = tflop(options.params, options.seq_len * options.batch, options.recompute)
    comm, compute = sent / options.gbs, work / (options.gpus * options.tflops)
    times = f" x {options.micro_batches} micro-batches" * (options.sharding in EVERY_MICRO_BATCH)
    lines = [
        f"communication: {TRANSMISSIONS[options.sharding]} x {options.bytes:g} bytes x {options.params / 1e9:g} B{times} "
        f"= {sent:,.0f} GB, {comm:.3g} s at {options.gbs:g} GB/s",
        f"compute: {4 if options.recompute else 3} x 2 x {options.params / 1e9:g} B x {options.seq_len:,} x "
        f"{options.batch:,} = {work:,.1f} TFLOP, {compute:.3g} s on {options.gpus:,} GPUs at {options.tflops:g} TFLOP/s",
    ]
    if comm > compute:
        least = f"at least {1 - compute / comm:.0%} of a step is waiting; from {sent / compute:.3g} GB/s on it could hide"
        return [*lines, f"network-bound: {least}"]
    return [
        *lines,
        f"compute-bound: communication takes {comm / compute:.0%} of that time, and can hide behind it",
    ]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, text in (
        ("params", float, "parameters, e.g. 8e9"),
        ("gpus", int, "in all"),
        ("tflops", float, "reached by one GPU"),
        ("gbs", float, "GB/s of each rank in one direction"),
        ("seq-len", int, "tokens of a sample"),
        ("batch", int, "samples of a step, in all"),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True, metavar="N", help=text)
    parser.add_argument("--sharding", choices=TRANSMISSIONS, default="zero3", help="default: zero3")
    parser.add_argument(
        "--bytes", type=float, default=2, metavar="N", help="of a number that is sent (2: bfloat16)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="gradient accumulation (1)"
    )
    parser.add_argument("--recompute", action="store_true", help="full activation checkpointing")
    options = parser.parse_args(arguments)
    if bad := [
        name for name, value in vars(options).items() if type(value) in (int, float) and value <= 0
    ]:
        parser.error(f"expected more than 0: {', '.join(bad)}")
    print("\n".join(report(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
