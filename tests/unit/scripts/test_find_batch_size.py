"""scripts/find_batch_size.py finds the largest batch size that fits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts import find_batch_size
from scripts.find_batch_size import Trial, TrialFailed, largest_that_fits, main


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 4, 5, 7, 8, 13, 31, 32, 33, 64])
@pytest.mark.parametrize("limit", [1, 32, 64])
def test_the_largest_size_that_fits_is_found_in_few_trials(largest: int, limit: int) -> None:
    trials = largest_that_fits(lambda size: Trial(size, size <= largest), limit)
    assert max((trial.size for trial in trials if trial.fits), default=0) == min(largest, limit)
    sizes = [trial.size for trial in trials]
    assert len(set(sizes)) == len(sizes) <= 2 * limit.bit_length() + 1 and max(sizes) <= limit


class FakeRuns:
    """Replaces run_train.sh: 10 GiB plus 5.2 GiB per sample, on a device with 48 GiB."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        values = dict(zip(command[1::2], command[2::2], strict=True))
        memory = 10 + 5.2 * int(values["--training.local_batch_size"])
        if values.get("--training.seq_len") == "0":
            return subprocess.CompletedProcess(
                command, 78, "training.seq_len = 0: expected > 0", None
            )
        if memory > 48:
            return subprocess.CompletedProcess(command, 1, "torch.OutOfMemoryError: CUDA", None)
        rows = [
            {"step": 1, "memory_gib": memory - 1},
            {"step": 2, "memory_gib": memory, "tps": 100.0},
        ]
        path = Path(values["--job.dump_folder"]) / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0, "", None)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(find_batch_size.subprocess, "run", fake)
    return fake


def test_the_search_finds_sizes_between_powers_of_two(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["x.toml", "--parallelism.tensor_parallel_degree", "2"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "training.local_batch_size = 7"
    assert "46.40" in out and "out of memory" in out
    assert all("--parallelism.tensor_parallel_degree" in command for command in runs.commands)


def test_a_limit_acts_as_the_size_of_the_memory(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["x.toml", "--limit-gib", "31"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "training.local_batch_size = 4" and "above 31 GiB" in out
    assert main(["x.toml", "--limit-gib", "12"]) == 1
    assert "Not even one sample fits." in capsys.readouterr().out


def test_another_failure_ends_the_search(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["x.toml", "--training.seq_len", "0"]) == 78
    assert "expected > 0" in capsys.readouterr().err and len(runs.commands) == 1
    assert issubclass(TrialFailed, Exception)


@pytest.mark.nightly
def test_real_trials_on_cpu(capsys: pytest.CaptureFixture[str], repo_root: Path) -> None:
    small = "--training.seq_len 64 --model.args.n_layers 1 --validation.enable=false".split()
    arguments = [
        str(repo_root / "train_configs/debug_model.toml"),
        "--limit-gib",
        "64",
        "--most",
        "3",
    ]
    assert main([*arguments, *small]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "training.local_batch_size = 3"
