"""Is this machine fit for training, and do the machines reach each other?

    python scripts/node_check.py --gpus 8                    # this machine alone: its GPUs and their health, each pair of them
    torchrun --nproc_per_node=8 scripts/node_check.py --ranks        # all ranks: memory, all_reduce, barrier
    srun --ntasks-per-node=8 python scripts/node_check.py --ranks    # the same without torchrun: MASTER_ADDR is the first host
    mpirun --hostfile hosts python scripts/node_check.py --ranks     # likewise

Alone it ends with "<host> is OK" or "<host> is BAD: ..." and 0 or 1. Of GPUs it looks at: their number, uncorrected memory
errors, rows waiting to be remapped, slow-down by the hardware, temperature, Xid errors in the kernel's log (where it may be
read), serial numbers known to be bad (--known-bad: a file of UUIDs, one a line). Without GPUs only the host's memory is
looked at. With --ranks every rank says "[<host>-<rank>] is OK", with its device and cores, or what is broken, and rank 0
the versions. To find the bad one among many machines: scripts/slurm/find_bad_nodes.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

GIB = 2**30
ANSWER = 60.0  # seconds for nvidia-smi, which a broken driver lets hang
HOT = 84  # degrees Celsius: beyond it cards slow down
XID = re.compile(r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<number>\d+)")
# What is asked of nvidia-smi, and the answers that are well. A card that does not have the thing answers [N/A].
QUERY = {
    "index": None,
    "uuid": None,
    "temperature.gpu": None,
    "ecc.errors.uncorrected.volatile.total": ("0",),
    "retired_pages.pending": ("No",),
    "remapped_rows.pending": ("No", "0"),
    "remapped_rows.failure": ("No", "0"),
    "clocks_throttle_reasons.hw_slowdown": ("Not Active",),
}


def host() -> str:
    return socket.gethostname().partition(".")[0]


# ---- this machine alone


def gpu_problems(csv: str, num_wanted: int | None, known_bad: set[str]) -> list[str]:
    """What is wrong with the GPUs, of nvidia-smi's answer to QUERY (csv,noheader,nounits)."""
    rows = [[word.strip() for word in line.split(",")] for line in csv.splitlines() if line.strip()]
    problems = [] if num_wanted in (None, len(rows)) else [f"{len(rows)} GPUs instead of {num_wanted}"]
    for row in rows:
        if len(row) != len(QUERY):
            problems.append(f"nvidia-smi says {', '.join(row)!r}")
            continue
        told = dict(zip(QUERY, row, strict=True))
        name = f"GPU {told['index']}"
        for key, well in QUERY.items():
            if well is not None and told[key] not in (*well, "[N/A]", "N/A", "[Not Supported]"):
                problems.append(f"{name}: {key} is {told[key]}")
        if told["temperature.gpu"].isdecimal() and int(told["temperature.gpu"]) >= HOT:
            problems.append(f"{name}: {told['temperature.gpu']} degrees")
        if told["uuid"] in known_bad:
            problems.append(f"{name}: {told['uuid']} is known to be bad")
    return problems


def xid_problems(kernel_log: str) -> list[str]:
    """The driver's errors, each number of each card once."""
    found = {(match["gpu"], int(match["number"])) for match in XID.finditer(kernel_log)}
    return [f"Xid {number} of {gpu}" for gpu, number in sorted(found)]


def output(*command: str) -> str:
    """What a command prints; "" where there is no such command. One that hangs is said to."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER).stdout
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER:g} s"


def pair_problems(num_gpus: int, timeout: float) -> list[str]:
    """Every pair of GPUs all-reduces by itself, so that a bad one shows in all of its pairs."""
    problems = []
    for pair in itertools.combinations(range(num_gpus), 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
        command += ["--rdzv_endpoint=localhost:0", __file__, "--ranks", "--timeout", str(timeout)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, pair))}
        try:
            failed = subprocess.run(command, env=env, capture_output=True, timeout=3 * timeout).returncode != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            problems.append(f"GPUs {pair[0]} and {pair[1]} do not reach each other")
    return problems


def available_gib() -> float:
    """Of the host's memory."""
    import psutil

    return float(psutil.virtual_memory().available) / GIB


def check_alone(options: argparse.Namespace) -> int:
    """Look at this machine; 0 when it is fit."""
    csv = output("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    num_gpus = len(csv.splitlines())
    known_bad = set(options.known_bad.read_text().split()) if options.known_bad else set()
    problems = gpu_problems(csv, options.gpus, known_bad)
    if num_gpus:
        problems += xid_problems(output("dmesg"))
        if not problems and not options.no_pairs:
            problems += pair_problems(num_gpus, options.timeout)
    if available_gib() < options.host_memory_gib:
        problems.append(
            f"{available_gib():.1f} GiB of host memory are available instead of {options.host_memory_gib:g}"
        )
    print(f"{host()} is BAD: {'; '.join(problems)}" if problems else f"{host()} is OK ({num_gpus} GPUs)")
    return 1 if problems else 0


# ---- all ranks

# Launchers and what they call rank, ranks in all, and rank on this machine.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def ranks_of(env: dict[str, str]) -> tuple[int, int, int]:
    """Rank, ranks in all, local rank, as the launcher tells; one rank without a launcher."""
    for names in LAUNCHERS:
        if all(name in env for name in names):
            rank, size, local = (int(env[name]) for name in names)
            return rank, size, local
    return 0, 1, 0


def join(backend: str | None, timeout: float) -> tuple[int, int, str]:
    """Make the process group of all ranks: this rank, how many there are, and its device. nccl on GPUs, else gloo."""
    import torch
    import torch.distributed as dist

    rank, size, local = ranks_of(dict(os.environ))
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = f"cuda:{local % torch.cuda.device_count()}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    dist.init_process_group(
        backend or ("nccl" if on_gpu else "gloo"), rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    return rank, size, device


def num_cores() -> int:
    """Those that this process may use: srun gives a task one, unless it is told otherwise."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exercise(device: str, memory_gib: float) -> list[str]:
    """In a process group: what this rank says when it can allocate, add up with all others, and meet them. Raises otherwise."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    if memory_gib:
        torch.ones(int(memory_gib * GIB), dtype=torch.uint8, device=device)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != size:
        raise RuntimeError(f"the ones of {size} ranks add up to {total.item():g}")
    dist.barrier()
    said = [f"[{host()}-{rank}] is OK ({device}, {num_cores()} cores)"]
    if rank == 0:
        cuda = f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}, " if device != "cpu" else ""
        versions = f"torch {torch.__version__}, {cuda}Python {platform.python_version()}"
        said.append(f"{size} ranks, {dist.get_backend()}, {versions}")
    return said


def check_ranks(options: argparse.Namespace) -> int:
    """What only all ranks together can tell; 0 on a rank that finds nothing."""
    from torchtitan_like.distributed.printflock import printflock

    try:
        _, _, device = join(options.backend, options.timeout)
        printflock("\n".join(exercise(device, options.memory_gib)))
    except Exception as error:  # whatever it is, this rank names itself
        printflock(f"[{host()}-{ranks_of(dict(os.environ))[0]}] is BROKEN: {error}")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true", help="started by a launcher: check all ranks together")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="for the ranks to find each other")
    parser.add_argument("--backend", help="nccl, gloo, ... (default: nccl on GPUs, else gloo)")
    parser.add_argument(
        "--memory-gib", type=float, default=0, metavar="N", help="what each rank must be able to allocate"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="how many there must be")
    parser.add_argument("--host-memory-gib", type=float, default=0, metavar="N", help="how much must be available")
    parser.add_argument("--known-bad", type=Path, metavar="FILE", help="UUIDs of GPUs, one a line")
    parser.add_argument("--no-pairs", action="store_true", help="do not try every pair of GPUs (seconds for each)")
    options = parser.parse_args(arguments)
    return check_ranks(options) if options.ranks else check_alone(options)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a group that has failed may hold threads that wait for ever
