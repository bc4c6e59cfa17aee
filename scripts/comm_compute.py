"""Estimate whether a step is limited by the network or by the GPUs, from a few numbers.

    python scripts/comm_compute.py --params 80e9 --gpus 512 --tflops 250 --gbs 42.5 --seq-len 1024 --batch 3584 --recompute
    python scripts/comm_compute.py --params 8e9 --gpus 64 --tflops 400 --gbs 200 --seq-len 8192 --batch 128 --sharding ddp

    communication = transmissions x bytes x params / (GB/s)
    compute       = passes x 2 x params x seq_len x batch / (gpus x FLOP/s)

Transmissions in a step:

- ddp, zero1: 2 (gradients are sent, sums are received)
- zero2 (reshard_after_forward = "never"): 2 for each micro-batch
- zero3 (FSDP): 3 for each micro-batch (weights are gathered twice, gradients are sent)

Passes: 1 for forward, 2 for backward, and 1 more with full activation checkpointing (--recompute).
Attention counts only its weights, as in 6 N D (Kaplan et al., Scaling laws for neural language
models, arXiv 2001.08361, section 2.1).

--gbs is the measured rate of each rank in one direction: busbw of `titan node bench` (1 GB/s is 8
Gbit/s). At best, the shorter of both times overlaps completely with the longer one. `titan plan`
compares whole layouts.
"""

from __future__ import annotations

import argparse
import sys

TRANSMISSIONS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
EVERY_MICRO_BATCH = ("zero2", "zero3")


def gigabytes(params: float, sharding: str, bytes_each: float, micro_batches: int) -> float:
    """Return the GB (1000^3 bytes) that a rank sends in a step."""
    times = micro_batches if sharding in EVERY_MICRO_BATCH else 1
    return TRANSMISSIONS[sharding] * times * bytes_each * params / 1e9


def tflop(params: float, tokens: float, recompute: bool) -> float:
    """Return the TFLOP (10^12 operations) that all ranks compute in a step of ``tokens``."""
    return (4 if recompute else 3) * 2 * params * tokens / 1e12


def report(options: argparse.Namespace) -> list[str]:
    """Return the lines with both times, their formulas, and the one that limits a step."""
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
        least = (
            f"at least {1 - compute / comm:.0%} of a step is waiting; "
            f"above {sent / compute:.3g} GB/s, computation could hide it"
        )
        return [*lines, f"network-bound: {least}"]
    return [
        *lines,
        f"compute-bound: communication takes {comm / compute:.0%} of that time, and computation can hide it",
    ]


def main(arguments: list[str]) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, text in (
        ("params", float, "parameters, e.g. 8e9"),
        ("gpus", int, "number of GPUs"),
        ("tflops", float, "TFLOP/s that one GPU reaches"),
        ("gbs", float, "GB/s of each rank in one direction"),
        ("seq-len", int, "tokens of a sample"),
        ("batch", int, "samples of a step, over all GPUs"),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True, metavar="N", help=text)
    parser.add_argument("--sharding", choices=TRANSMISSIONS, default="zero3", help="default: zero3")
    parser.add_argument(
        "--bytes",
        type=float,
        default=2,
        metavar="N",
        help="bytes of each number that is sent (default: 2, bfloat16)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches of gradient accumulation (default: 1)",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="with full activation checkpointing"
    )
    options = parser.parse_args(arguments)
    if bad := [
        name for name, value in vars(options).items() if type(value) in (int, float) and value <= 0
    ]:
        parser.error(f"expected numbers above 0: {', '.join(bad)}")
    print("\n".join(report(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
