"""Changes that make a configuration fit are tried in the order of their cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.cli import main as titan
from torchtitan_like.config import JobConfig
from torchtitan_like.plan import remedies
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.util.units import GIB

DEBUG = ["--job.config_file", "train_configs/debug_model.toml"]


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def reserve(monkeypatch: pytest.MonkeyPatch, gib_of: Any) -> None:
    """Replace dry runs by a function from a configuration to GiB."""

    def plan(config: JobConfig, world_size: int, gpu: Any) -> list[RankMemory]:
        reserved = round(gib_of(config) * GIB)
        return [RankMemory(0, 0, reserved, reserved, {"other": reserved}, "step 1", {}, 0, {})]

    monkeypatch.setattr(remedies, "plan_memory", plan)


def find(settings: list[str], world_size: int = 2) -> tuple[bool, list[str]]:
    argv = [*DEBUG, *settings]
    config, _ = load_checked(argv, world_size, training=False)
    return remedies.check_fit(config, world_size, load_gpu("h100-80g"))


def test_the_cheapest_three_sufficient_changes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"none": 90, "selective": 88, "full": 40}
    reserve(
        monkeypatch,
        lambda config: (
            full[config.activation_checkpoint.mode]
            / config.parallelism.tensor_parallel_degree
            / (8 if config.training.enable_cpu_offload else 1)
        ),
    )
    is_fitting, lines = find([])
    assert not is_fitting
    assert lines[0].endswith("92.0 of 79.1 GiB (116 %) on the fullest rank, 0: does not fit")
    assert [line.split()[1] for line in lines[2:]] == [
        "--activation_checkpoint.mode=full",
        "--parallelism.tensor_parallel_degree=2",
        "--training.enable_cpu_offload=true",
    ]


def test_changes_that_the_layout_forbids_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, lambda config: 90 / config.parallelism.tensor_parallel_degree)
    is_fitting, lines = find([], world_size=1)  # one rank cannot have two tensor-parallel ranks
    assert not is_fitting
    assert "use more GPUs" in lines[1] and len(lines) == 2


def test_a_configuration_that_fits_needs_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, lambda config: 20)
    assert find([]) == (
        True,
        ["NVIDIA H100 SXM, 80 GB: 22.0 of 79.1 GiB (28 %) on the fullest rank, 0: fits"],
    )


def test_check_plans_and_returns_1_if_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "debug_model.toml", "--plan", "h100-80g"]
    assert titan(words) == 2
    assert "--world-size N next to it" in capsys.readouterr().err
    assert titan([*words[:-1], "h99", "--world-size", "2"]) == 2
    assert "there is no GPU 'h99'" in capsys.readouterr().err
    reserve(monkeypatch, lambda config: 90)
    assert titan([*words, "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert "does not fit" in captured.err and "[training]" in captured.out
