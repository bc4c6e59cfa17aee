"""The processes of dry runs end with the command that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONFIG = Path(__file__).resolve().parents[3] / "train_configs/debug_model.toml"


@pytest.mark.nightly
def test_dry_runs_end_when_the_planner_was_killed() -> None:
    words = ["plan", str(CONFIG), "--world-size", "2", "--model.args.n_layers=8"]
    planner = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_like", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process = psutil.Process(planner.pid)
    end = time.monotonic() + 100
    while not (children := process.children()) and planner.poll() is None:
        assert time.monotonic() < end, "no dry run began"
        time.sleep(0.02)
    assert children, "the planner ended before it was killed"
    planner.send_signal(signal.SIGKILL)
    planner.wait()
    while alive := [child for child in children if is_running(child)]:
        assert time.monotonic() < end, alive
        time.sleep(0.1)


def is_running(process: psutil.Process) -> bool:
    """Return False for a process that has ended, also if nobody has asked for its exit code."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
