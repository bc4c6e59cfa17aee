"""`model.name = "hf"` takes the sizes of the model from config.json in model.hf_assets_path."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError, JobConfig, Problem, dump_toml

PUBLISHED = json.loads((Path(__file__).parents[2] / "assets/hf_configs.json").read_text())
CONFIG = "train_configs/debug_model.toml"


@pytest.fixture
def assets(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tokenizer."""
    monkeypatch.chdir(repo_root)
    return Path(shutil.copytree(repo_root / "tests/assets/tokenizer", tmp_path / "assets"))


def load(
    assets: Path, fields: dict[str, Any] | None, *settings: str, world_size: int = 1
) -> tuple[JobConfig, list[Problem]]:
    if fields is not None:
        (assets / "config.json").write_text(json.dumps(fields))
    arguments = ["--job.config_file", CONFIG, "--model.name=hf", f"--model.hf_assets_path={assets}"]
    return load_checked([*arguments, *settings], world_size, training=True)


def refused(assets: Path, fields: dict[str, Any] | None, *settings: str, **options: int) -> str:
    with pytest.raises(ConfigError) as error:
        load(assets, fields, *settings, **options)
    return str(error.value)


def published(name: str, **changes: object) -> dict[str, Any]:
    return {**PUBLISHED[name]["config"], **changes}


def test_the_file_gives_flavor_and_sizes(assets: Path) -> None:
    config, warnings = load(assets, published("Qwen/Qwen2.5-0.5B"), "--model.args.n_layers=3")
    assert config.model.flavor == "qwen2"
    assert config.model.args["dim"] == 896
    assert config.model.args["n_layers"] == 3, "the command line precedes the file"
    assert config.origin_of("model.args.dim") == str(assets / "config.json")
    assert config.origin_of("model.args.n_layers") == "command line"
    (warning,) = [each for each in warnings if each.key == "model.flavor"]
    assert warning.value == "debugmodel"  # of the TOML file
    assert warning.has_no_effect and f"{assets / 'config.json'} sets it" in warning.expected


def test_a_stored_configuration_needs_no_file(assets: Path, tmp_path: Path) -> None:
    config, _ = load(assets, published("mistralai/Mistral-7B-v0.1"))
    (assets / "config.json").unlink()
    (tmp_path / "config.toml").write_text(dump_toml(config))
    again, warnings = load_checked(
        ["--job.config_file", str(tmp_path / "config.toml")], 1, training=True
    )
    assert again.model == config.model
    assert not [warning for warning in warnings if warning.key.startswith("model.")]


def test_unknown_fields_are_a_warning(assets: Path) -> None:
    _, warnings = load(assets, published("01-ai/Yi-6B", new_gate=True))
    (warning,) = [each for each in warnings if each.key == "model.hf_assets_path"]
    assert warning.expected.startswith(f"{assets / 'config.json'} has fields that are unknown")
    assert warning.expected.endswith("new_gate = true")


def test_each_unsupported_field_is_one_problem(assets: Path) -> None:
    fields = published("ibm-granite/granite-3.3-8b-instruct")
    message = refused(assets, fields, "--training.stepz=1")
    assert message.startswith("6 problems")  # four multipliers, model_type, and the other setting
    assert "command line: model.hf_assets_path" in message and "model.flavor" not in message
    assert "residual_multiplier = 0.22: expected no such field or 1" in message
    assert "-> use another checkpoint, or convert it to a supported one" in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("[1]", "it contains no table"), ("{", "Expecting property name")],
)
def test_a_missing_or_damaged_file_is_one_problem(
    content: str | None, reason: str, assets: Path
) -> None:
    if content is not None:
        (assets / "config.json").write_text(content)
    message = refused(assets, None)
    assert message.startswith("1 problem") and reason in message
    assert "expected a folder with the config.json of a model" in message


def test_sizes_that_do_not_fit_are_named(assets: Path) -> None:
    fields = published("mistralai/Mistral-7B-v0.1", num_key_value_heads=5)
    message = refused(assets, fields)
    assert "n_kv_heads = 5: expected a divisor of n_heads = 32" in message
    message = refused(assets, published("01-ai/Yi-6B"), "--model.args.multiple_of=256")
    assert "multiple_of = 256: hf has no such argument" in message


def test_odd_numbers_of_heads_limit_tensor_parallelism(assets: Path) -> None:
    fields = published("HuggingFaceTB/SmolLM-135M-Instruct")
    tp = "--parallelism.tensor_parallel_degree"
    message = refused(assets, fields, f"{tp}=2", world_size=2)
    assert "9 attention heads" in message
    load(assets, fields, f"{tp}=3", "--training.seq_len=192", "--validation.seq_len=192", world_size=3)  # fmt: skip


def test_titan_check_imports_no_torch(assets: Path, repo_root: Path) -> None:
    (assets / "config.json").write_text(json.dumps(published("Qwen/Qwen3-0.6B")))
    code = (
        "import sys\nfrom torchtitan_like.cli import main\n"
        "code = main(['check', *sys.argv[1:]])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    arguments = [CONFIG, "--model.name", "hf", "--model.hf_assets_path", str(assets)]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert 'flavor = "qwen3"' in result.stdout and "head_dim = 128" in result.stdout
