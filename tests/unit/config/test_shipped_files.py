"""Files of TorchTitan are accepted unchanged. Bundled files fit the hardware that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.config import JobConfig
from torchtitan_like.preflight import load_checked

TORCHTITAN = {"debug_model": 2, "llama3_8b": 64, "llama3_70b": 64, "llama3_405b": 128}
LLAMA = {"llama3_1b": 8, "llama3_3b": 8, "llama3_8b": 64, "llama3_70b": 256, "llama3_405b": 512, "llama3_8b_128k": 64}
QWEN = {"qwen3_0.6b": 8, "qwen3_1.7b": 8, "qwen3_32b": 64}
OURS = {"debug_model": 2, **LLAMA, **QWEN}


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def load(file: str, world_size: int, *, training: bool = False) -> JobConfig:
    return load_checked(["--job.config_file", file], world_size, training=training)[0]


@pytest.mark.parametrize(("name", "world_size"), TORCHTITAN.items())
def test_torchtitan_files_pass(name: str, world_size: int) -> None:
    load(f"tests/assets/torchtitan/{name}.toml", world_size)


def test_values_of_torchtitan_files_are_loaded() -> None:
    config = load("tests/assets/torchtitan/llama3_405b.toml", 128)
    assert (config.model.flavor, config.optimizer.lr, config.lr_scheduler.warmup_steps) == ("405B", 8e-5, 600)
    assert config.model.converters == ["quantize.linear.float8"]
    assert config.quantize.linear.float8.filter_fqns == ["output"]
    assert config.parallelism.enable_async_tensor_parallel and config.compile.enable


def test_every_bundled_file_is_checked(repo_root: Path) -> None:
    assert {file.stem for file in (repo_root / "train_configs").glob("*.toml")} == OURS.keys()


@pytest.mark.parametrize(("name", "world_size"), OURS.items())
def test_bundled_files_pass(name: str, world_size: int, repo_root: Path) -> None:
    file = repo_root / f"train_configs/{name}.toml"
    load(str(file), world_size)
    header = file.read_text().split("\n\n")[0]
    assert "# Hardware: " in header and "yper-parameters: " in header


def test_the_first_run_has_no_warnings() -> None:
    _, warnings = load_checked(["--job.config_file", "train_configs/debug_model.toml"], 2, training=True)
    assert warnings == []
