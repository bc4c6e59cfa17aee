"""scripts/watch.py and scripts/watchdog.py: what is told of a run from its folder, and when somebody is told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts import watch, watchdog

NOW = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps of 100, two seconds each; two checkpoints of 3 files an hour apart."""
    rows = [
        {"step": n, "n_tokens_seen": 64 * n, "loss": 3.5, "grad_norm": 1.0, "lr": 1e-3, "time": NOW - 2 * (11 - n)}
        for n in range(1, 11)
    ]
    rows[-2] |= {"tps": 1234.0, "tflops": 5.0, "mfu": 41.2, "memory_gib": 7.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo')
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


def beat(run: Path, rank: int, step: int, micro_batch: int, seconds: float, attempt: int = 2) -> None:
    file = run / f"attempts/{attempt}/heartbeat/rank-{rank}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"phase": "train", "step": step, "micro_batch": micro_batch, "time": NOW - seconds}))


def test_where_a_run_is_and_when_it_will_be_done(run: Path) -> None:
    text = "\n".join(watch.report(run, NOW))
    assert "step 10 of 100 (2 s ago), 640 tokens" in text, "the torn row is not there yet"
    assert "loss 3.5000" in text and "1,234 tokens/s on each device, 5.00 TFLOP/s, 41.2 % MFU, 7.50 GiB" in text
    assert "2 s a step: 3:00 min left" in text
    assert "ended" not in text and "ranks" not in text


def test_ranks_in_other_places_are_told_apart(run: Path) -> None:
    beat(run, 0, step=99, micro_batch=9, seconds=0, attempt=1)  # of an earlier attempt
    for rank in (0, 1, 3):
        beat(run, rank, step=11, micro_batch=2, seconds=1)
    beat(run, 2, step=11, micro_batch=1, seconds=90)
    lines = watch.heartbeat_lines(run, NOW)
    assert lines[0] == "1 of 4 ranks in step 11 micro-batch 1 train, heard up to 1:30 min ago: 2"
    assert lines[1] == "3 of 4 ranks in step 11 micro-batch 2 train, heard up to 1 s ago: 0, 1, 3"
    assert lines[2:] == ["SILENT for more than 60 s: ranks 2"]


def test_a_run_that_is_over_says_how(run: Path) -> None:
    beat(run, 0, step=11, micro_batch=0, seconds=1e5)
    (run / "exit.json").write_text('{"reason": "requeue", "code": 75, "step": 10}')
    text = "\n".join(watch.report(run, NOW))
    assert "ended at step 10: requeue (code 75)" in text and "SILENT" not in text


@pytest.mark.parametrize(
    ("seconds", "said"), [(7, "7 s"), (306, "5:06 min"), (14_700, "4:05 h"), (273_900, "3 d 04:05 h")]
)
def test_durations(seconds: float, said: str) -> None:
    assert watch.duration(seconds) == said


def test_no_run_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(tmp_path), "--once"]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err


# ---- watchdogs


def asked(output: str, code: int = 0):
    return lambda *_, **__: subprocess.CompletedProcess([], code, output, "slurm is away")


@pytest.mark.parametrize(
    ("output", "is_alert"),
    [("7 RUNNING\n8 PENDING\n", False), ("8 PENDING\n", False), ("7 COMPLETING\n", True), ("", True)],
)
def test_a_job_is_alive_when_it_runs_or_waits(output: str, is_alert: bool) -> None:
    assert watchdog.look_at_job("train", asked(output)).is_alert == is_alert


def test_a_slurm_that_does_not_answer_is_no_dead_job() -> None:
    with pytest.raises(OSError, match="slurm is away"):
        watchdog.look_at_job("train", asked("", code=1))


def test_a_log_that_does_not_grow(run: Path) -> None:
    file = run / "metrics.jsonl"
    os.utime(file, (NOW, NOW))
    assert [watchdog.look_at_log(file, 30, NOW + 60 * m).is_alert for m in (29, 31)] == [False, True]
    assert watchdog.look_at_log(run / "nowhere", 30, NOW).is_alert


@pytest.mark.parametrize(
    ("options", "is_alert"),
    [
        ([], False),
        (["--min-free-gib", "1"], False),
        (["--min-free-gib", "3"], True),
        (["--min-free-inodes", "100"], False),
        (["--min-free-inodes", "101"], True),
        (["--min-saves", "33"], False),  # of 100 inodes each takes 3
        (["--min-saves", "34"], True),
        (["--min-days", "1.37"], False),  # 33 of them, one an hour
        (["--min-days", "1.38"], True),
        (["--quota-gib", "0.001"], False),
        (["--quota-gib", "0.00001"], True),  # exceeded
    ],
)
def test_low_disk(run: Path, options: list[str], is_alert: bool) -> None:
    free = ["--free-command", f"echo {2 * 2**30} 100"]
    assert watchdog.main(["disk", str(run), *free, *options]) == is_alert


def test_room_is_told_in_checkpoints_and_days(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watchdog.main(["disk", str(run), "--free-command", f"echo {24 * 24_576}"]) == 0
    assert "24 checkpoints left (at least 0), 1.0 days of saves left" in capsys.readouterr().out


def test_an_alert_is_handed_on_and_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = ["log", str(tmp_path / "nowhere"), "--log", str(tmp_path / "main.log")]
    told = tmp_path / "told"
    assert watchdog.main([*missing, "--notify", f"cat >{told}"]) == 1
    assert told.read_text() == f"log {tmp_path / 'nowhere'}: it is not there"
    assert "watchdog ALERT log" in (tmp_path / "main.log").read_text()
    assert watchdog.main([*missing, "--notify", f"rm {told}", "--dry-run"]) == 1
    assert told.exists() and f"would run: rm {told}" in capfd.readouterr().out
    assert watchdog.main([*missing, "--notify", "false"]) == 2
    assert "false returned 1" in capfd.readouterr().err


def test_a_checkpoint_that_is_deleted_meanwhile_is_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = watchdog.newest_save(run)
    glob = Path.glob
    gone = run / "checkpoint/step-1/manifest.json"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [gone, *glob(folder, pattern)])
    assert expected is not None and watchdog.newest_save(run) == expected
