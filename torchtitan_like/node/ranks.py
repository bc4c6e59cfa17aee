"""Check that all ranks of a job reach each other. Works under torchrun, srun and mpirun."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan_like.distributed.printflock import printflock
from torchtitan_like.node.machine import host_name
from torchtitan_like.util.host import num_cores
from torchtitan_like.util.units import GIB

# Environment variables of each launcher: rank, number of ranks, rank on this machine.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
DEFAULT_PORT = "29501"


class Ranks(NamedTuple):
    """This process among all ranks."""

    rank: int
    world_size: int
    local_rank: int


def launched_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the launcher's variables. Without a launcher there is one rank."""
    for names in LAUNCHERS:
        if all(name in environ for name in names):
            return Ranks(*(int(environ[name]) for name in names))
    return Ranks(0, 1, 0)


def join_ranks(backend: str | None, timeout: float) -> tuple[Ranks, str]:
    """Create the process group of all ranks. Returns this rank and its device.

    backend: None chooses nccl on GPUs and gloo on CPUs. timeout: seconds.
    """
    ranks = launched_ranks(os.environ)
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = f"cuda:{ranks.local_rank % torch.cuda.device_count()}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    dist.init_process_group(
        backend or ("nccl" if on_gpu else "gloo"),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout),
    )
    return ranks, device


def check_ranks(backend: str | None, timeout: float, memory_gib: float) -> bool:
    """Let all ranks allocate, all-reduce and meet at a barrier. Prints the result of this rank.

    memory_gib: what this rank must be able to allocate. Returns False if anything fails.
    """
    try:
        _, device = join_ranks(backend, timeout)
        printflock("\n".join(exercise_group(device, memory_gib)))
    except Exception as error:  # of any kind: this rank must name itself
        rank = launched_ranks(os.environ).rank
        printflock(f"[{host_name()}-{rank}] is BROKEN: {error}")
        return False
    return True


def exercise_group(device: str, memory_gib: float) -> list[str]:
    """Allocate, all-reduce and meet at a barrier. Returns the lines of this rank, or raises."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if memory_gib:
        torch.ones(int(memory_gib * GIB), dtype=torch.uint8, device=device)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != world_size:
        raise RuntimeError(f"the sum of 1 over {world_size} ranks is {total.item():g}")
    dist.barrier()
    lines = [f"[{host_name()}-{rank}] is OK ({device}, {num_cores()} cores)"]
    if rank == 0:
        cuda = ""
        if device != "cpu":
            cuda = f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}, "
        versions = f"torch {torch.__version__}, {cuda}Python {platform.python_version()}"
        lines.append(f"{world_size} ranks, {dist.get_backend()}, {versions}")
    return lines
