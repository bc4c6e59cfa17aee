"""TorchTitan's files are accepted unchanged. Bundled files fit their stated hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like import cli
from torchtitan_like.check import load_checked
from torchtitan_like.cli import config_commands
from torchtitan_like.config import ConfigError, JobConfig, load_config
from torchtitan_like.util import bundle
from torchtitan_like.util.bundle import config_names

TORCHTITAN = {"debug_model": 2, "llama3_8b": 64, "llama3_70b": 64, "llama3_405b": 128,
              "qwen3_moe_debug": 2, "deepseek_v3_debug_model": 2, "deepseek_v3_16b": 8, "deepseek_v3_671b": 512,
              "gpt_oss_debug_model": 2, "llama4_debug_model": 2, "llama4_17bx16e": 64,
              "llama4_17bx128e": 64}  # fmt: skip
LLAMA = {
    "llama3_1b": 8,
    "llama3_3b": 8,
    "llama3_8b": 64,
    "llama3_70b": 256,
    "llama3_405b": 512,
    "llama3_8b_128k": 64,
}
QWEN = {
    "qwen3_0.6b": 8,
    "qwen3_1.7b": 8,
    "qwen3_32b": 64,
    "qwen3_moe_debug": 2,
    "qwen3_30b_a3b": 64,
}
DEEPSEEK = {"deepseek_v3_debug": 2, "deepseek_v3_16b": 8, "deepseek_v3_671b": 512}
RECIPES = ("8bit_states", "batch_ramp", "bf16_states", "cosine_short", "dense_125m", "dense_1m", "dense_3m", "lion",
           "little_code", "moe", "more_code", "muon", "seq_ramp", "seq_ramp_start", "wsd", "wsd_branch")  # fmt: skip
BUNDLED = {
    "debug_model": 2,
    "debugmodel_moe": 2,
    "gpt_oss_debug": 2,
    "llama4_debug": 2,
    **LLAMA,
    **QWEN,
    **DEEPSEEK,
    **{f"recipes/{name}": 1 for name in RECIPES},
}


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def load(file: str, world_size: int, *, training: bool = False) -> JobConfig:
    return load_checked(["--job.config_file", file], world_size, training=training)[0]


@pytest.mark.parametrize(("name", "world_size"), TORCHTITAN.items())
def test_torchtitan_files_pass(name: str, world_size: int) -> None:
    load(f"tests/assets/torchtitan/{name}.toml", world_size)


def test_too_few_micro_batches_in_a_file_are_an_error_only_in_training() -> None:
    """TorchTitan's own schedule refuses this file too: a step has 1 micro-batch for 4 stages."""
    arguments = ["--job.config_file", "tests/assets/torchtitan/llama4_17bx128e.toml"]
    key, text = "parallelism.pipeline_parallel_microbatch_size", "1 are fewer than the 4 stages"
    warnings = load_checked(arguments, 64, training=False)[1]
    (warning,) = [problem for problem in warnings if problem.key == key]
    assert text in warning.expected and "so that there are 4" in warning.remedy
    with pytest.raises(ConfigError) as error:
        load_checked(arguments, 64, training=True)
    errors = [problem for problem in error.value.problems if problem.severity == "error"]
    assert key in [problem.key for problem in errors]
    more = [*arguments, "--training.local_batch_size", "4"]
    assert key not in [problem.key for problem in load_checked(more, 64, training=False)[1]]


def test_values_of_torchtitan_files_are_loaded() -> None:
    config = load("tests/assets/torchtitan/llama3_405b.toml", 128)
    assert (config.model.flavor, config.optimizer.lr, config.lr_scheduler.warmup_steps) == (
        "405B",
        8e-5,
        600,
    )
    assert config.model.converters == ["quantize.linear.float8"]
    assert config.quantize.linear.float8.filter_fqns == ["output"]
    assert config.parallelism.enable_async_tensor_parallel and config.compile.enable


def test_every_bundled_file_is_checked(repo_root: Path) -> None:
    names = {name.removesuffix(".toml") for name in config_names()}
    assert names == BUNDLED.keys()


@pytest.mark.parametrize(("name", "world_size"), BUNDLED.items())
def test_bundled_files_pass(name: str, world_size: int, repo_root: Path) -> None:
    file = repo_root / f"train_configs/{name}.toml"
    load(str(file), world_size)
    header = file.read_text().split("\n\n")[0]
    assert "# Hardware: " in header and "yper-parameters: " in header


def test_the_first_run_has_no_warnings() -> None:
    _, warnings = load_checked(
        ["--job.config_file", "train_configs/debug_model.toml"], 2, training=True
    )
    assert warnings == []


def test_a_file_in_the_working_folder_replaces_a_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--job.config_file", "debug_model.toml"]
    assert load_config(words).training.steps == 200
    (tmp_path / "debug_model.toml").write_text("[training]\nsteps = 7\n")
    assert load_config(words).training.steps == 7


def test_a_recipe_is_found_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = tmp_path / "configs"
    (configs / "recipes").mkdir(parents=True)
    (configs / "base.toml").write_text("[training]\nseq_len = 64\n")
    recipe = 'extends = "base.toml"\n# Hardware: any machine.\n[job]\ndescription = "A recipe"\n'
    (configs / "recipes/tiny.toml").write_text(recipe)
    monkeypatch.setattr(bundle, "TRAIN_CONFIGS", configs)
    monkeypatch.setattr(config_commands, "TRAIN_CONFIGS", configs)
    monkeypatch.chdir(tmp_path)
    words = ["--job.config_file", "recipes/tiny.toml"]
    assert load_config(words).training.seq_len == 64
    (configs / "base.toml").write_text("[job]\ndescription = 'Base'\n")
    assert cli.main(["config", "ls"]) == cli.main(["config", "show", "recipes/tiny"]) == 0
    listed = "recipes/tiny.toml".ljust(28) + "A recipe".ljust(48) + "any machine\n"
    assert capsys.readouterr().out.endswith(listed + recipe)
    with pytest.raises(ConfigError, match='did you mean "recipes/tiny.toml"'):
        load_config(["--job.config_file", "recipes/tyni.toml"])
    with pytest.raises(ConfigError, match="expected an existing file"):
        load_config(["--job.config_file", "../configs/base.toml"])
