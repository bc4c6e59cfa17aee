"""How fast do the ranks add up tensors?

    torchrun --nproc_per_node=8 scripts/all_reduce_bench.py --sizes 32KB,1MB,32MB,4GB --advertised 450
    srun --ntasks-per-node=8 python scripts/all_reduce_bench.py      # MASTER_ADDR names the first host

algbw = bytes / time, what one rank gets done. busbw = algbw x 2 (n - 1) / n for n ranks, what each link carries, as every byte
is sent once to be added and once to be shared: that one is compared with the hardware (NVIDIA, nccl-tests, PERFORMANCE.md).
--advertised is its speed in GB/s in one direction; 80 % of it is usual for large tensors. A size is that of one rank's tensor,
in float32; KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024. The time of a repetition is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.node_check import join

UNITS = {
    "": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMG", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMG", 1)},
}


def num_bytes(text: str) -> int:
    """Of a size such as 4GB. ValueError when it is none."""
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B|)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; expected a number with KB, MB, GB, KiB, MiB, GiB or nothing")
    return int(float(match[1]) * UNITS[match[2]])


def bandwidths(size: int, seconds: float, num_ranks: int) -> tuple[float, float]:
    """algbw and busbw, in bytes per second."""
    algbw = size / seconds
    return algbw, algbw * 2 * (num_ranks - 1) / num_ranks


def measure(size: int, device: str, warmup: int, repeat: int) -> float:
    """Median seconds of an all_reduce of ``size`` bytes, each repetition as long as its slowest rank takes."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    tensor = torch.ones(max(1, size // 4), device=device)
    taken = []
    for _ in range(warmup + repeat):
        dist.barrier()
        wait()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        wait()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return statistics.median(taken[warmup:])


def line(size: int, seconds: float, num_ranks: int, advertised: float | None) -> str:
    """A row of the table."""
    algbw, busbw = bandwidths(size, seconds, num_ranks)
    row = f"{size:>15,} {seconds * 1e3:>11.3f} {algbw / 1e9:>9.2f} {busbw / 1e9:>9.2f} {busbw * 8 / 1e9:>9.1f}"
    return row if advertised is None else f"{row} {busbw / 1e9 / advertised:>6.1%}"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", metavar="LIST", help="default: 64KB to 4GB, to 64MB without GPUs")
    parser.add_argument("--advertised", type=float, metavar="GBPS", help="the link's speed in one direction, in GB/s")
    parser.add_argument("--backend", help="nccl, gloo, ... (default: nccl on GPUs, else gloo)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args(arguments)
    try:
        sizes = [num_bytes(text) for text in options.sizes.split(",")] if options.sizes else None
    except ValueError as error:
        parser.error(str(error))
    import torch.distributed as dist

    rank, num_ranks, device = join(options.backend, timeout=300)
    sizes = sizes or [64_000 * 4**i for i in range(9 if device != "cpu" else 6)]
    if rank == 0:
        print(f"all_reduce, {num_ranks} ranks, {dist.get_backend()} on {device.partition(':')[0]}")
        print(
            f"{'bytes':>15} {'ms':>11} {'algbw':>9} {'busbw':>9} {'busbw':>9}{' of advertised' if options.advertised else ''}"
        )
        print(f"{'':>15} {'':>11} {'GB/s':>9} {'GB/s':>9} {'Gbit/s':>9}")
    for size in sizes:
        seconds = measure(size, device, options.warmup, options.repeat)
        if rank == 0:
            print(line(size, seconds, num_ranks, options.advertised), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
