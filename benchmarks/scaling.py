"""Weak scaling: throughput on several ranks with a constant number of samples per rank.

    python -m benchmarks.scaling --ranks 1,2 [--rounds 3] [--case S] [-- SETTINGS]
    python -m benchmarks.scaling --ranks 1,2,4,8 --case M -- --compile.enable true

Each run is a new process, or torchrun's ranks on this machine. A round runs all sizes in turn. The
table has medians of tokens per second, of all ranks and of one. The efficiency is the rate of one
rank divided by its rate in the smallest size, within the round. Linear scaling has an efficiency of
1. Settings after `--` go to the trainer (layout, compilation).

CPU ranks need a core each; the output reports missing cores. For several machines, compare `tps` in
metrics.jsonl of runs on 1, 2, 4 ... machines with the same `training.local_batch_size`: this is the
rate of one rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.trainer import CASES, ROOT, Case, settings, spread


def rate(case: Case, ranks: int, extra: list[str], folder: Path) -> float:
    """Run the trainer and return the median tokens per second of one rank after the warm-up."""
    from torchtitan_like.util.jsonl import read_rows

    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable]
    if ranks > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--rdzv-backend",
            "c10d",
        ]
        command += ["--rdzv-endpoint", "localhost:0"]
    command += ["-m", "torchtitan_like.train", *settings(case, str(out)), *extra]
    process = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(
            f"{ranks} ranks failed ({process.returncode}):\n"
            f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
        )
    return statistics.median(
        row["tps"] for row in read_rows(out / "metrics.jsonl") if row["step"] > case.warmup
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", default="1,2", help="comma-separated numbers of ranks, the smallest first"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size")
    parser.add_argument(
        "--case", choices=list(CASES), default="S", help="the model, as in benchmarks/trainer.py"
    )
    parser.add_argument("settings", nargs="*", help="after --: settings of the trainer")
    arguments = parser.parse_args(argv)
    sizes = [int(number) for number in arguments.ranks.split(",")]
    import torch

    num_devices = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    if sizes[-1] > num_devices:
        print(
            f"{sizes[-1]} ranks share {num_devices} devices or cores and wait for each other",
            file=sys.stderr,
        )
    rounds: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            rounds.append(
                [
                    rate(CASES[arguments.case], size, arguments.settings, Path(folder))
                    for size in sizes
                ]
            )
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else torch.backends.cpu.get_cpu_capability()
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} {device}, "
        f"{num_devices} devices or cores, torch {torch.__version__}, "
        f"`python -m benchmarks.scaling {' '.join(argv)}`"
    )
    print("\n| ranks | tokens per second | of one rank | efficiency |\n|---|---|---|---|")
    for i, size in enumerate(sizes):
        rates_per_rank = [rates[i] for rates in rounds]
        efficiency = spread([rates[i] / rates[0] for rates in rounds], 3)
        print(
            f"| {size} | {spread([size * value for value in rates_per_rank], 0)} "
            f"| {spread(rates_per_rank, 0)} | {efficiency} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
