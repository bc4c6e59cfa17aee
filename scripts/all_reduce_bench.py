"""How fast do the ranks add up tensors?

    torchrun --nproc_per_node=8 scripts/all_reduce_bench.py --sizes 32KB,1MB,32MB,4GB --advertised 450
    torchrun --nproc_per_node=8 scripts/all_reduce_bench.py --sizes 4GB --parts 1000 --flags
    srun --ntasks-per-node=8 python scripts/all_reduce_bench.py      # MASTER_ADDR names the first host

algbw = bytes / time, what one rank gets done. busbw = algbw x 2 (n - 1) / n for n ranks, what each link carries, as every byte
is sent once to be added and once to be shared: that one is compared with the hardware (NVIDIA, nccl-tests, PERFORMANCE.md).
--advertised is its speed in GB/s in one direction; 80 % of it is usual for large tensors. A size is that of one rank's tensor,
in float32; KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024. The time of a repetition is that of its slowest rank.

--parts N sends each size once more, as N tensors one after the other, and tells how many times slower that is: FSDP sends the
weights of a block at a time (parameters of a block x bytes of each), which should be large. --flags compares two ways to agree
on a yes or no, all_reduce of one number and all_gather_object.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

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


def measure(work: Callable[[], object], device: str, warmup: int, repeat: int) -> float:
    """Median seconds that ``work``, a collective, takes; each repetition as long as on its slowest rank."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    taken = []
    for _ in range(warmup + repeat):
        dist.barrier()
        wait()
        begin = time.perf_counter()
        work()
        wait()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return statistics.median(taken[warmup:])


def measure_all_reduce(size: int, parts: int, device: str, warmup: int, repeat: int) -> float:
    """Seconds of an all_reduce of ``size`` bytes, as so many tensors one after the other."""
    import torch
    import torch.distributed as dist

    # chunk() may make fewer: none of them is empty.
    tensors = torch.ones(max(1, size // 4), device=device).chunk(parts)

    def work() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return measure(work, device, warmup, repeat)


def measure_flags(device: str, warmup: int, repeat: int) -> tuple[float, float]:
    """Seconds in which all ranks know whether one of them says yes: by all_reduce, and by all_gather_object."""
    import torch
    import torch.distributed as dist

    def reduced() -> bool:
        flag = torch.tensor(0, dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def gathered() -> bool:
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, False)
        return any(flags)

    return measure(reduced, device, warmup, repeat), measure(gathered, device, warmup, repeat)


def line(size: int, seconds: float, num_ranks: int, advertised: float | None) -> str:
    """A row of the table."""
    algbw, busbw = bandwidths(size, seconds, num_ranks)
    speeds = f"{algbw / 1e9:>9.2f} {algbw * 8 / 1e9:>9.1f} {busbw / 1e9:>9.2f} {busbw * 8 / 1e9:>9.1f}"
    row = f"{size:>15,} {seconds * 1e3:>11.3f} {speeds}"
    return row if advertised is None else f"{row} {busbw / 1e9 / advertised:>6.1%}"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", metavar="LIST", help="default: 64KB to 4GB, to 64MB without GPUs")
    parser.add_argument("--advertised", type=float, metavar="GBPS", help="the link's speed in one direction, in GB/s")
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="send each size as N tensors, too")
    parser.add_argument("--flags", action="store_true", help="compare two ways to agree on a yes or no")
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
    say = functools.partial(print, flush=True) if rank == 0 else lambda _: None
    say(f"all_reduce, {num_ranks} ranks, {dist.get_backend()} on {device.partition(':')[0]}")
    say(f"{'':>15} {'':>11} {'algbw':>9} {'algbw':>9} {'busbw':>9} {'busbw':>9}")
    share = "" if options.advertised is None else " of advertised"
    say(f"{'bytes':>15} {'ms':>11} {'GB/s':>9} {'Gbit/s':>9} {'GB/s':>9} {'Gbit/s':>9}{share}")
    how = (device, options.warmup, options.repeat)
    for size in sizes:
        whole = measure_all_reduce(size, 1, *how)
        say(line(size, whole, num_ranks, options.advertised))
        if options.parts > 1:
            cut = measure_all_reduce(size, options.parts, *how)
            row = line(size, cut, num_ranks, options.advertised)
            say(f"{row}  in {options.parts:,} parts: {cut / whole:.1f} x slower")
    if options.flags:
        reduced, gathered = measure_flags(*how)
        say(f"a flag: all_reduce {reduced * 1e3:.3f} ms, all_gather_object {gathered * 1e3:.3f} ms: "
            f"{gathered / reduced:.1f} x slower")  # fmt: skip
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
