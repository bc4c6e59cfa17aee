"""Measure the CPU seconds of `titan` commands that start no training.

    python benchmarks/cli.py --rounds 7

Prints a table with median, minimum and maximum of each command and of an empty Python program. The
commands read a run that this script writes to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests/assets/checkpoints/v3/step-3"
NUM_CHECKPOINTS = 20
NUM_STEPS = 1000
LIMIT = 0.5  # CPU seconds

COMMANDS = (
    "titan --help",
    "titan train --help",
    "titan check debug_model.toml --world-size 2",
    "titan ckpt --help",
    "titan ckpt ls run/checkpoint",
    "titan ckpt show run/checkpoint/step-50",
    "titan run ls run",
    "titan data --help",
    "titan plan --help",
    "titan download --help",
)


def write_run(folder: Path) -> None:
    """Write a run directory with checkpoints and metrics."""
    for number in range(1, NUM_CHECKPOINTS + 1):
        shutil.copytree(CHECKPOINT, folder / f"checkpoint/step-{number * 50}")
    shutil.copy(CHECKPOINT / "config.toml", folder / "config.toml")
    rows = ({"step": step, "loss": 8 / step, "grad_norm": 1.0} for step in range(1, NUM_STEPS + 1))
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def cpu_seconds(words: list[str], folder: Path) -> float:
    """Return user and system time of a process. Raises CalledProcessError if it fails."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Print the table. Returns 1 if the median of a command is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="starts of each command (default: 7)")
    arguments = parser.parse_args()
    programs = {"python -c pass": [sys.executable, "-c", "pass"]}
    for command in COMMANDS:
        programs[command] = [sys.executable, "-m", "torchtitan_like", *command.split()[1:]]
    times: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "run")
        for _ in range(arguments.rounds + 1):
            for command, words in programs.items():
                times[command].append(cpu_seconds(words, folder))
    print("| command | CPU seconds: median (minimum-maximum) |\n|---|---|")
    slow = []
    for command, values in times.items():
        measured = values[1:]  # the first start may compile modules
        median = statistics.median(measured)
        print(f"| `{command}` | {median:.2f} ({min(measured):.2f}-{max(measured):.2f}) |")
        if median > LIMIT:
            slow.append(command)
    if slow:
        print(f"Above {LIMIT} s of CPU: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
