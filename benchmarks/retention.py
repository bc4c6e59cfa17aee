"""Measure the time of retention after a checkpoint, by the number of kept steps.

python benchmarks/retention.py --kept 10 500 2000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from torchtitan_like.checkpoint.step_folders import Retention, write_manifest
from torchtitan_like.util.extents import write_file

NUM_RANKS = 4
SAVES = 5


def make_step(folder: Path, number: int) -> None:
    """Write a full step of NUM_RANKS ranks with small files."""
    step = folder / f"step-{number}"
    step.mkdir()
    names = [f"shard-{rank:05d}.bin" for rank in range(NUM_RANKS)]
    files = {name: write_file(step / name, bytes(100)) for name in names}
    manifest = {"kind": "full", "step": number, "config": "x" * 8000, "files": files}
    write_manifest(step, manifest)


def measure(num_kept: int, keep_latest_k: int, keep_every: int) -> list[float]:
    """Return the milliseconds of `apply` after each checkpoint, with `num_kept` older steps."""
    # Without fsync, because the benchmark measures only reading.
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        folder = Path(name)
        for number in range(1, num_kept + 1):
            make_step(folder, number)
        retention = Retention(folder, keep_latest_k=keep_latest_k, keep_every=keep_every)
        times = []
        for number in range(num_kept + 1, num_kept + 1 + SAVES):
            make_step(folder, number)
            start = time.perf_counter()
            retention.apply()
            times.append(1e3 * (time.perf_counter() - start))
        retention.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=int, nargs="+", default=[10, 500, 2000])
    for num_kept in parser.parse_args().kept:
        for keep_latest_k, keep_every in ((0, 0), (10, 1)):
            first, *others = measure(num_kept, keep_latest_k, keep_every)
            print(
                f"{num_kept:>6} kept steps, keep_latest_k {keep_latest_k:>2}, "
                f"keep_every {keep_every}: {first:7.1f} ms for the first checkpoint, "
                f"{statistics.median(others):7.1f} ms for each later one"
            )


if __name__ == "__main__":
    main()
