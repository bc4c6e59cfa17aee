"""Find the largest training.local_batch_size that fits into memory, by short runs of a config.

    python scripts/find_batch_size.py train_configs/llama3_8b.toml --ngpu 8
    python scripts/find_batch_size.py train_configs/debug_model.toml --limit-gib 4

Each trial is a short run through run_train.sh, with the options of the real run. The size
doubles until a trial runs out of memory or uses more than --limit-gib. Bisection then finds the
largest size that fits, whatever number that is: batch sizes need no alignment. The script reads the
memory of rank 0. Without --limit-gib, the search ends only when a trial runs out of memory, which
needs a GPU.

Exit codes: 0 a size was found; 1 not even one sample fits; 2 wrong arguments. A trial that fails
for another reason ends the search with its code and its last lines.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.util.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[1]
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator|MemoryError|killed by signal 9|SIGKILL"
)


class Trial(NamedTuple):
    """One run: its batch size, whether it fits, its peak memory (GiB) and tokens per second."""

    size: int
    fits: bool
    memory_gib: float = 0.0
    tps: float = 0.0


class TrialFailed(Exception):
    """A trial that failed for another reason than a lack of memory."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        super().__init__("\n".join(output.splitlines()[-30:]))


def largest_that_fits(try_size: Callable[[int], Trial], most: int) -> list[Trial]:
    """Try sizes from 1 on, doubling and then bisecting. Return all trials in order.

    Assumes that a size fits if a larger one does.
    """
    trials = [try_size(1)]
    low, high = (1, most + 1) if trials[0].fits else (0, 1)
    size = 2
    while high - low > 1:
        size = min(size, (low + high) // 2 if high <= most else most)
        trials.append(try_size(size))
        if trials[-1].fits:
            low, size = size, 2 * size
        else:
            high, size = size, (low + size) // 2
    return trials


def run_trial(
    size: int, *, config: str, ngpu: int, steps: int, limit_gib: float, options: list[str]
) -> Trial:
    """Run some steps with this batch size. Raises TrialFailed."""
    with tempfile.TemporaryDirectory(prefix="find_batch_size-") as folder:
        settings = {
            "job.config_file": config,
            "job.dump_folder": folder,
            "training.steps": steps,
            "training.local_batch_size": size,
            "training.global_batch_size": -1,
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": "false",
            "metrics.enable_wandb": "false",
            "checkpoint.enable": "false",
            "profiling.enable_profiling": "false",
        }
        first, *rest = (
            settings.items()
        )  # the last value of a key wins: these settings come after the options
        words = [f"--{first[0]}", str(first[1]), *options]
        words += [part for key, value in rest for part in (f"--{key}", str(value))]
        done = subprocess.run(
            [str(ROOT / "run_train.sh"), *words],
            cwd=ROOT,
            env={**os.environ, "NGPU": str(ngpu), "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            if OUT_OF_MEMORY.search(done.stdout):
                return Trial(size, False)
            raise TrialFailed(done.returncode, done.stdout)
        rows = read_rows(Path(folder) / "metrics.jsonl")
    memory = max(row["memory_gib"] for row in rows)
    return Trial(size, memory <= limit_gib, memory, rows[-1].get("tps") or 0.0)


def table(trials: list[Trial], limit_gib: float) -> str:
    """Return the table of all trials by size, and the largest size that fits."""
    lines = ["local_batch_size  memory (GiB)  tokens/s per rank"]
    for one in sorted(trials):
        memory = f"{one.memory_gib:.2f}" if one.memory_gib else "out of memory"
        note = "" if one.fits or not one.memory_gib else f"  above {limit_gib:g} GiB"
        lines.append(f"{one.size:16}  {memory:>13}  {one.tps:17,.0f}{note}")
    sizes = [one.size for one in trials if one.fits]
    best = f"training.local_batch_size = {max(sizes)}" if sizes else "Not even one sample fits."
    return "\n".join([*lines, best])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--ngpu", type=int, default=1, help="ranks of each trial")
    parser.add_argument("--steps", type=int, default=3, help="steps of each trial")
    parser.add_argument("--most", type=int, default=1024, help="largest size to try")
    parser.add_argument(
        "--limit-gib",
        type=float,
        default=float("inf"),
        help="GiB of a rank above which a trial does not fit",
    )
    arguments, options = parser.parse_known_args(argv)
    if min(arguments.ngpu, arguments.steps, arguments.most) < 1 or arguments.limit_gib <= 0:
        parser.error("--ngpu, --steps, --most and --limit-gib must be larger than 0")

    def try_size(size: int) -> Trial:
        trial = run_trial(
            size,
            config=arguments.config,
            ngpu=arguments.ngpu,
            steps=arguments.steps,
            limit_gib=arguments.limit_gib,
            options=options,
        )
        print(
            f"local_batch_size {size}: {'fits' if trial.fits else 'does not fit'}", file=sys.stderr
        )
        return trial

    try:
        trials = largest_that_fits(try_size, arguments.most)
    except TrialFailed as failed:
        print(f"a trial ended with code {failed.code}; its last lines:\n{failed}", file=sys.stderr)
        return failed.code
    print(table(trials, arguments.limit_gib))
    return 0 if any(one.fits for one in trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
