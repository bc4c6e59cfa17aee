"""Measure the growth of host memory in a long run.

    python benchmarks/soak.py [--steps 20000] [--ranks 2]

Trains a two-layer model with FSDP2 on CPU ranks and reads the resident memory of rank 0 from
metrics.jsonl. It prints the least-squares slope of the second half of the run, with the default
`comm.trace_buf_size` and without the flight recorder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"dim": 64, "n_layers": 2, "n_heads": 4}


def train(folder: Path, steps: int, ranks: int, trace_buf_size: int | None) -> dict[int, float]:
    """Make one run and return the resident memory of rank 0 in MiB by step."""
    settings = {
        "job.config_file": ROOT / "train_configs/debug_model.toml",
        "job.dump_folder": folder,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.steps": steps,
        "metrics.log_freq": max(1, steps // 200),
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "data.cache_folder": folder / "tokens",
        **{f"model.args.{key}": value for key, value in MODEL.items()},
    }
    if trace_buf_size is not None:
        settings["comm.trace_buf_size"] = trace_buf_size
    command = [sys.executable, "-m", "torchtitan_like.torchrun", "--nproc-per-node", str(ranks)]
    command += ["-m", "torchtitan_like.train"]
    command += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(
            f"The run ended with {process.returncode}:\n{process.stdout}{process.stderr}"
        )
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: 1024 * row["memory_gib"] for row in rows if "memory_gib" in row}


def slope(memory: dict[int, float]) -> float:
    """Return the growth in MiB per 1,000 steps over the second half of the run."""
    last = max(memory)
    second_half = {step: mib for step, mib in memory.items() if step > last / 2}
    return 1000 * statistics.linear_regression(list(second_half), list(second_half.values())).slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    print(
        "| flight recorder | step 100, MiB | middle, MiB | end, MiB "
        "| MiB per 1,000 steps, second half |"
    )
    print("|---|---|---|---|---|", flush=True)
    for name, size in (("default", None), ("off", 0)):
        with tempfile.TemporaryDirectory() as folder:
            memory = train(Path(folder), arguments.steps, arguments.ranks, size)
        cells = [
            f"{memory[min(memory, key=lambda step: abs(step - target))]:.0f}"
            for target in (100, arguments.steps // 2, arguments.steps)
        ]
        print(f"| {name} | {' | '.join(cells)} | {slope(memory):.2f} |", flush=True)


if __name__ == "__main__":
    main()
