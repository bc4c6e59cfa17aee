"""Measure what retention adds to a save, by the number of steps that are kept.

    python benchmarks/retention.py --kept 10 500 2000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from torchtitan_like.checkpoint.extents import write_file
from torchtitan_like.checkpoint.retention import Retention
from torchtitan_like.checkpoint.step_folders import write_manifest

NUM_RANKS = 4
SAVES = 5


def make_step(folder: Path, number: int) -> None:
    """A full step as NUM_RANKS ranks write it, of small files."""
    step = folder / f"step-{number}"
    step.mkdir()
    names = [f"shard-{rank:05d}.bin" for rank in range(NUM_RANKS)]
    files = {name: write_file(step / name, bytes(100)) for name in names}
    manifest = {"kind": "full", "step": number, "config": "x" * 8000, "files": files}
    write_manifest(step, manifest)


def measure(kept: int, keep_latest_k: int, keep_every: int) -> list[float]:
    """Milliseconds that `apply` takes after each of SAVES saves, when `kept` steps are there already."""
    # Not synced to disk: only reading is measured.
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        folder = Path(name)
        for number in range(1, kept + 1):
            make_step(folder, number)
        retention = Retention(folder, keep_latest_k=keep_latest_k, keep_every=keep_every)
        times = []
        for number in range(kept + 1, kept + 1 + SAVES):
            make_step(folder, number)
            begin = time.perf_counter()
            retention.apply()
            times.append(1e3 * (time.perf_counter() - begin))
        retention.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=int, nargs="+", default=[10, 500, 2000])
    for kept in parser.parse_args().kept:
        for keep_latest_k, keep_every in ((0, 0), (10, 1)):
            first, *others = measure(kept, keep_latest_k, keep_every)
            print(
                f"{kept:>6} kept steps, keep_latest_k {keep_latest_k:>2}, keep_every {keep_every}: "
                f"{first:7.1f} ms for the first save, {statistics.median(others):7.1f} ms for each other"
            )


if __name__ == "__main__":
    main()
