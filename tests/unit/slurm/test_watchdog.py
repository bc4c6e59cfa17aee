"""The watchdog: conditions of alerts, and notifications."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from torchtitan_like.report import disk
from torchtitan_like.report.disk import newest_checkpoint
from torchtitan_like.report.state import find_state
from torchtitan_like.slurm import watchdog
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.run_directory import RunEnd, steps_below, write_exit

NOW = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run at step 10 of 100, with 2 s per step and two checkpoints an hour apart."""
    rows = [
        {
            "step": n,
            "n_tokens_seen": 64 * n,
            "loss": 3.5,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "time": NOW - 2 * (11 - n),
        }
        for n in range(1, 11)
    ]
    rows[-2] |= {"tps": 1234.0, "tflops": 5.0, "mfu": 41.2, "memory_gib": 7.5}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo'
    )
    (tmp_path / "config.toml").write_text(
        "[checkpoint]\nsteps = 3\n[training]\nseq_len = 8\nsteps = 100 # of 64 tokens\n"
    )
    for step in (5, 10):
        folder = tmp_path / f"checkpoint/step-{step}"
        folder.mkdir(parents=True)
        for name in ("manifest.json", "shard-0.bin", "config.toml"):
            (folder / name).write_bytes(b"x" * 8192)
        os.utime(folder / "manifest.json", (NOW, NOW + 720 * step))
    return tmp_path


def fake_slurm(output: str, code: int = 0):
    return lambda *_, **__: subprocess.CompletedProcess([], code, output, "Slurm does not respond")


@pytest.mark.parametrize(
    ("output", "is_alert"),
    [
        ("7 RUNNING\n8 PENDING\n", False),
        ("8 PENDING\n", False),
        ("7 COMPLETING\n", True),
        ("", True),
    ],
)
def test_a_running_or_pending_job_is_no_alert(output: str, is_alert: bool) -> None:
    assert watchdog.observe_job("train", fake_slurm(output)).is_alert == is_alert


def test_an_error_of_slurm_is_raised() -> None:
    with pytest.raises(OSError, match="Slurm does not respond"):
        watchdog.observe_job("train", fake_slurm("", code=1))


@pytest.mark.parametrize(
    ("end", "minutes", "is_alert"),
    [
        (None, 29, False),
        (None, 31, True),
        ("requeue", 29, False),
        ("requeue", 31, True),  # its next job has not started
        ("done", 31, False),
        ("bad_numbers", 1, True),  # a new start does not help
    ],
)
def test_a_run_that_does_not_move_or_needs_a_person_is_an_alert(
    run: Path, end: str | None, minutes: float, is_alert: bool
) -> None:
    if end is not None:
        write_exit(run, RunEnd(end, ExitCode[end.upper()], 10))
    seen = watchdog.observe_run(run, 30, NOW - 2 + 60 * minutes)
    state = find_state(run, NOW - 2 + 60 * minutes)
    assert seen.is_alert == is_alert and state.line in seen.message, seen
    assert watchdog.observe_run(run / "checkpoint", 30, NOW).is_alert


@pytest.mark.parametrize(
    ("options", "is_alert"),
    [
        ([], False),
        (["--min-free-gib", "1"], False),
        (["--min-free-gib", "3"], True),
        (["--min-free-inodes", "100"], False),
        (["--min-free-inodes", "101"], True),
        (["--min-saves", "33"], False),  # each checkpoint uses 3 of 100 inodes
        (["--min-saves", "34"], True),
        (["--min-days", "1.37"], False),  # 33 checkpoints, one per hour
        (["--min-days", "1.38"], True),
        (["--quota-gib", "0.001"], False),
        (["--quota-gib", "0.00001"], True),  # exceeded
    ],
)
def test_low_disk_space_is_an_alert(run: Path, options: list[str], is_alert: bool) -> None:
    free = ["--free-command", f"echo {2 * 2**30} 100"]
    assert watchdog.main(["disk", str(run), *free, *options]) == is_alert


def test_free_space_is_reported_in_checkpoints_and_days(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watchdog.main(["disk", str(run), "--free-command", f"echo {24 * 24_576}"]) == 0
    assert (
        "24 checkpoints left (at least 0), 1.0 days of checkpoints left" in capsys.readouterr().out
    )


def test_an_alert_is_sent_and_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = ["run", str(tmp_path / "nowhere"), "--log", str(tmp_path / "main.log")]
    received = tmp_path / "received"
    assert watchdog.main([*missing, "--notify", f"cat >{received}"]) == 1
    assert received.read_text() == f"run {tmp_path / 'nowhere'}: no run has started in this folder"
    assert "watchdog ALERT run" in (tmp_path / "main.log").read_text()
    assert watchdog.main([*missing, "--notify", f"rm {received}", "--dry-run"]) == 1
    assert received.exists() and f"would run: rm {received}" in capfd.readouterr().out
    assert watchdog.main([*missing, "--notify", "false"]) == 2
    assert "false returned 1" in capfd.readouterr().err


def test_what_cannot_be_determined_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert watchdog.main(["disk", "/nowhere"]) == 2
    assert "/nowhere: No such file or directory. Expected" in capsys.readouterr().err


def test_a_concurrently_deleted_checkpoint_is_ignored(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = newest_checkpoint(run)
    steps = [(1, run / "checkpoint/step-1"), *steps_below(run)]
    monkeypatch.setattr(disk, "steps_below", lambda _: steps)
    assert expected is not None and newest_checkpoint(run) == expected
