"""Commands and the trainer work on the folder of a run that an early version of this program wrote.

`tests/assets/runs/first` has two attempts of the run in `tests/faults/test_golden.py`, on one rank
with a checkpoint every 2 steps. The second one continued after step 4 with a learning rate of 1e38.
Step 6 was not finite, so it stopped with code 70. Logs and environments are not kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.test_golden import DIGESTS, LAST_CHAIN
from tests.harness.runner import ROOT, run_trainer
from torchtitan_like.cli import main as titan
from torchtitan_like.monitor import log

FIRST = ROOT / "tests/assets/runs/first"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run. The working folder is the repository, as paths in it are relative."""
    monkeypatch.chdir(ROOT)
    return shutil.copytree(FIRST, tmp_path / "outputs")


def output_of(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert titan(words) == code
    return capsys.readouterr().out


def test_run_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (summary,) = json.loads(output_of(["run", "ls", str(run), "--json"], capsys))
    expected = {
        "state": "stopped",
        "reason": "bad_numbers",
        "step": 8,
        "total_steps": 8,
        "checkpoint": 5,
    }
    assert summary.items() >= expected.items() and summary["num_attempts"] == 2


def test_run_watch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of(["run", "watch", str(run), "--once"], capsys)
    assert "step 8 of 8" in output and "512 tokens" in output
    assert "stopped: bad_numbers (code 70) at step 5" in output
    assert "1 of 1 ranks in step 5 micro-batch 0 save" in output


def test_run_compare(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of(["run", "compare", str(run), str(FIRST)], capsys)
    assert output.startswith("8 steps in both, 1 to 8\n") and "differs" not in output


def test_ckpt_interval(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ckpt", "interval", "--run", str(run), "--mtbf-hours", "12"]
    assert "from 3 checkpoints and 7 steps of" in output_of(words, capsys)


def test_ckpt_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of(["ckpt", "verify", str(run / "checkpoint")], capsys)
    assert output.count(": intact, ") == 2


def test_run_replay(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "init_logger", lambda *_: None)
    bundle = run / "attempts/2/bad-steps/step-6.json"
    output = output_of(["run", "replay", str(bundle)], capsys)
    assert "step 6" in output


def test_the_run_is_resumed(run: Path) -> None:
    """As its first attempt would have continued: rows of the second one are set aside."""
    shutil.rmtree(run / "checkpoint/step-5")
    arguments = ["--job.config_file", str(run / "attempts/1/config.toml"), "--training.steps", "8"]
    result = run_trainer([*arguments, "--job.dump_folder", str(run)], 1, run)
    assert result.exit == {"reason": "done", "code": 0, "step": 8}, result.tail
    assert [row["step"] for row in result.metrics] == list(range(1, 9))
    assert [row["data_digest"] for row in result.metrics[3:]] == DIGESTS
    assert result.metrics[-1]["data_digest_chain"] == LAST_CHAIN
    discarded = (run / "metrics.discarded-3.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in discarded] == [5, 6, 7, 8]
