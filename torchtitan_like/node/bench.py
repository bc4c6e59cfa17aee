"""Measure how fast ranks all-reduce.

algbw = bytes / time: the speed that one rank sees. busbw = algbw x 2 (n - 1) / n for n ranks: the
speed of each link, to compare with the hardware (NVIDIA, nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_like.node.ranks import join_ranks

UNITS = {
    "": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMG", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMG", 1)},
}
JOIN_SECONDS = 300


@dataclass(frozen=True)
class Repetitions:
    """Where and how often a collective is measured."""

    device: str
    warmup: int
    repeat: int


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 4GB. Raises ValueError."""
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B|)", text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size. Expected a number with KB, MB, GB, KiB, MiB, GiB or nothing. "
            "Correct --sizes."
        )
    return int(float(match[1]) * UNITS[match[2]])


def bandwidths(size: int, seconds: float, num_ranks: int) -> tuple[float, float]:
    """Return algbw and busbw, in bytes per second."""
    algbw = size / seconds
    return algbw, algbw * 2 * (num_ranks - 1) / num_ranks


def measure(collective: Callable[[], object], repetitions: Repetitions) -> float:
    """Return the median seconds of a collective. Of each repetition the slowest rank counts."""

    def wait() -> None:
        if repetitions.device != "cpu":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(repetitions.warmup + repetitions.repeat):
        dist.barrier()
        wait()
        start = time.perf_counter()
        collective()
        wait()
        elapsed = time.perf_counter() - start
        slowest = torch.tensor(elapsed, dtype=torch.float64, device=repetitions.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return statistics.median(seconds[repetitions.warmup :])


def measure_all_reduce(size: int, num_tensors: int, repetitions: Repetitions) -> float:
    """Return the seconds of an all-reduce of `size` bytes, as several tensors in sequence."""
    # chunk() may return fewer tensors, because none of them is empty.
    tensors = torch.ones(max(1, size // 4), device=repetitions.device).chunk(num_tensors)

    def all_reduce() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return measure(all_reduce, repetitions)


def measure_flags(repetitions: Repetitions) -> tuple[float, float]:
    """Return the seconds to agree on a flag by all_reduce, and by all_gather_object."""

    def reduce_flag() -> bool:
        flag = torch.tensor(0, dtype=torch.int32, device=repetitions.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather_flag() -> bool:
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, False)
        return any(flags)

    return measure(reduce_flag, repetitions), measure(gather_flag, repetitions)


def format_row(size: int, seconds: float, num_ranks: int, advertised: float | None) -> str:
    """Return a row of the table. advertised: GB/s of a link."""
    algbw, busbw = (speed / 1e9 for speed in bandwidths(size, seconds, num_ranks))
    speeds = f"{algbw:>9.2f} {algbw * 8:>9.1f} {busbw:>9.2f} {busbw * 8:>9.1f}"
    row = f"{size:>15,} {seconds * 1e3:>11.3f} {speeds}"
    return row if advertised is None else f"{row} {busbw / advertised:>6.1%}"


def run_bench(
    sizes: Sequence[int] | None,
    *,
    advertised: float | None,
    num_tensors: int,
    measures_flags: bool,
    backend: str | None,
    warmup: int,
    repeat: int,
) -> None:
    """Measure all sizes on all ranks, and print a table on rank 0.

    sizes: bytes; None: from 64 KB to 4 GB, or to 64 MB without GPUs. num_tensors: above 1, measure
    each size also as so many tensors. measures_flags: also measure two ways to agree on a flag.
    """
    ranks, device = join_ranks(backend, JOIN_SECONDS)
    num_ranks = ranks.world_size
    if sizes is None:
        sizes = [64_000 * 4**i for i in range(9 if device != "cpu" else 6)]
    show = functools.partial(print, flush=True) if ranks.rank == 0 else lambda _: None
    show(f"all_reduce, {num_ranks} ranks, {dist.get_backend()} on {device.partition(':')[0]}")
    show(f"{'':>15} {'':>11} {'algbw':>9} {'algbw':>9} {'busbw':>9} {'busbw':>9}")
    share = "" if advertised is None else " of advertised"
    show(f"{'bytes':>15} {'ms':>11} {'GB/s':>9} {'Gbit/s':>9} {'GB/s':>9} {'Gbit/s':>9}{share}")
    repetitions = Repetitions(device, warmup, repeat)
    for size in sizes:
        whole = measure_all_reduce(size, 1, repetitions)
        show(format_row(size, whole, num_ranks, advertised))
        if num_tensors > 1:
            seconds = measure_all_reduce(size, num_tensors, repetitions)
            row = format_row(size, seconds, num_ranks, advertised)
            show(f"{row}  in {num_tensors:,} parts: {seconds / whole:.1f} x slower")
    if measures_flags:
        reduced, gathered = measure_flags(repetitions)
        show(
            f"a flag: all_reduce {reduced * 1e3:.3f} ms, all_gather_object "
            f"{gathered * 1e3:.3f} ms: {gathered / reduced:.1f} x slower"
        )
    dist.destroy_process_group()
