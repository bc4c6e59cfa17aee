"""A bench or ladder that is interrupted and killed has the results of one that is not."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.runner import ROOT, kill_session, listen_to_signals, trainer_environment
from torchtitan_like.util.exit_codes import ExitCode

WORDS = (
    "bench debug_model.toml --vary optimizer.lr=8e-4,4e-4 --repeat 2 --training.steps 120 "
    "--checkpoint.interval 20 --training.dataset shakespeare_validation --training.seq_len 32 "
    "--validation.enable false --model.args.dim 32 --model.args.n_layers 2 --model.args.n_heads 4 "
    "--metrics.log_freq 1 --metrics.enable_tensorboard false --job.dump_folder"
)
NAMES = ["base,seed=42", "lr=4e-4,seed=42", "base,seed=43", "lr=4e-4,seed=43"]
LADDER = (
    "ladder debug_model.toml --rungs 4 --factor 1.5 --tokens-per-param 0.05 --checkpoint.interval 5 "
    "--model.args.dim 64 --model.args.n_layers 2 --model.args.n_heads 16 --training.seq_len 32 "
    "--training.dataset shakespeare_validation --validation.seq_len 32 --validation.steps 4 "
    "--metrics.log_freq 1 --metrics.enable_tensorboard false --job.dump_folder"
)
OF_TIME = ("tps", "mfu", "step_s", "memory_gib", "equal_seconds", "loss_at_equal_time")


def start(folder: Path, words: str = WORDS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torchtitan_like", *words.split(), str(folder)],
        cwd=ROOT,
        env=trainer_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_signals,
    )


def wait_for_rows(run: Path, num_rows: int) -> None:
    deadline = time.monotonic() + 120
    file = run / "metrics.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= num_rows):
        assert time.monotonic() < deadline, f"{file} has less than {num_rows} rows"
        time.sleep(0.01)


def read_csv(folder: Path, name: str = "bench.csv") -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def test_an_interrupted_and_killed_bench_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = start(tmp_path / "a")
    output, _ = uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0, output

    folder = tmp_path / "b"
    interrupted = start(folder)
    wait_for_rows(folder / NAMES[1], 30)
    interrupted.send_signal(signal.SIGINT)
    output, _ = interrupted.communicate(timeout=100)
    assert interrupted.returncode == ExitCode.INTERRUPTED, output
    assert f"The bench stopped in {NAMES[1]}" in output
    assert (
        list((folder / NAMES[1] / "checkpoint").glob("step-*")) and not (folder / NAMES[2]).exists()
    )

    killed = start(folder)
    wait_for_rows(folder / NAMES[2], 30)
    output = kill_session(killed)
    assert "1 of 4 runs are done already" in output and f"Run 2 of 4, index 1: {NAMES[1]}" in output

    finished = start(folder)
    output, _ = finished.communicate(timeout=300)
    assert finished.returncode == 0, output
    assert "2 of 4 runs are done already" in output and "100%" in output
    assert (folder / "bench.html").stat().st_size > 1_000_000

    expected, actual = read_csv(tmp_path / "a"), read_csv(folder)
    assert [row["seed"] for row in actual] == ["42", "42", "43", "43"]
    for before, after in zip(expected, actual, strict=True):
        assert before.keys() == after.keys()
        assert {key: after[key] for key in before if not key.startswith(OF_TIME)} == {
            key: value for key, value in before.items() if not key.startswith(OF_TIME)
        }
        assert after["loss_at_equal_tokens"] and after["loss_at_equal_tokens_ci95"]
    for name, attempts in zip(NAMES, (1, 2, 2, 1), strict=True):
        assert len(list((folder / name / "attempts").iterdir())) == attempts


def test_a_killed_ladder_continues_and_predicts_its_target(tmp_path: Path) -> None:
    killed = start(tmp_path, LADDER)
    wait_for_rows(tmp_path / "rung-2,seed=42", 20)
    kill_session(killed)
    assert not (tmp_path / "rung-3,seed=42").exists()

    finished = start(tmp_path, LADDER)
    output, _ = finished.communicate(timeout=300)
    assert finished.returncode == 0, output
    assert "1 of 4 runs are done already" in output and "Run 2 of 4, index 1: rung-2" in output
    assert "rung-4 from the smaller rungs: predicted" in output
    rows = read_csv(tmp_path, "ladder.csv")
    assert [row["state"] for row in rows] == ["done"] * 4
    assert [row["law_loss"] for row in rows] == [row["validation_loss"] for row in rows]
    assert all(row["planned_tokens"] == row["tokens"] for row in rows)
    for number, attempts in zip((1, 2, 3, 4), (1, 2, 1, 1), strict=True):
        folder = tmp_path / f"rung-{number},seed=42"
        assert len(list((folder / "attempts").iterdir())) == attempts
    assert "Scaling ladder" in (tmp_path / "ladder.html").read_text()
    (prediction,) = json.loads((tmp_path / "ladder.json").read_text())["predictions"]
    assert prediction["low"] <= prediction["loss"] <= prediction["high"]
