"""Settings of disabled features are never refused. One warning lists all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from torchtitan_like.check import check_config, load_checked
from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.config.base import Need
from torchtitan_like.config.fields import Setting, all_settings, find

# Arguments that disable a feature which the defaults enable.
OFF = {
    "parallelism.context_parallel_rotate_method": [
        "--parallelism.context_parallel_rotate_method=ulysses"
        " --parallelism.context_parallel_degree=2"
    ],
    "parallelism.expert_parallel_exchange": [
        "--parallelism.expert_parallel_degree=2 --parallelism.expert_parallel_exchange=exact"
    ],
    "parallelism.module_fqns_per_model_part": [
        "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 norm,output"
        " --parallelism.pipeline_parallel_degree=2 --model.args.n_layers=1"
    ],
    "checkpoint.keep_latest_k": ["--checkpoint.enable --checkpoint.keep_latest_k=0"],
    "checkpoint.load_only": ["--checkpoint.enable --checkpoint.load_only"],
    "checkpoint.load_step": ["--checkpoint.enable --checkpoint.load_step=5"],
    "checkpoint.start": [
        "--checkpoint.enable --checkpoint.start=resume",
        "--checkpoint.enable --checkpoint.start=scratch",
        "--checkpoint.enable --checkpoint.start=warm --checkpoint.initial_load_path=.",
    ],
    "data.sources": ["--data.sources.a.path README.md --data.sources.a.format tokens"],
    "lr_scheduler.decay_ratio": ["--lr_scheduler.decay_ratio=0.0"],
    "optimizer.name": ["--optimizer.name=Lion"],
    "optimizer.weight_decay": ["--optimizer.weight_decay=0.0"],
    "resilience.spike_threshold": ["--resilience.spike_threshold=0.0"],
    "resilience.on_high_norm": ["--resilience.on_high_norm=accept"],
    "comm.trace_buf_size": ["--comm.trace_buf_size=0"],
    "training.gc_freq": ["--training.gc_freq=0"],
    "activation_checkpoint.mode": ["--activation_checkpoint.mode=none"],
}
# These settings enable a feature that itself needs another enabled feature.
DEPENDENT_SWITCHES = ("checkpoint.create_seed_checkpoint",)
# Only user code can disable what needs this setting; tests/unit/extensions covers it.
SWITCHES_OF_USER_CODE = ("lr_scheduler.name",)
WORDS = ("nonsense", "s3://bucket/x", "3")


def values_of(setting: Setting) -> Iterator[Any]:
    """Yield values that are not the default, as arguments. Some may be invalid."""
    default = setting.default
    if setting.kind is bool:
        yield "false" if default else "true"
    elif setting.choices:
        yield from (choice for choice in setting.choices if choice != default)
    elif setting.kind in (int, float):
        yield from ("1", "2", "7", "999")
    else:
        yield from WORDS


def is_accepted(key: str, value: str) -> bool:
    """Return True if the value is valid without other settings."""
    try:
        load_config([f"--{key}", value])
    except (ConfigError, ValidationError):
        return False
    return True


def settings_by_need() -> dict[str, tuple[Need, list[Setting]]]:
    """Return every need, by its text, with the settings that have it."""
    groups: dict[str, tuple[Need, list[Setting]]] = {}
    for setting in all_settings():
        if "<name>" not in setting.path and setting.key not in DEPENDENT_SWITCHES:
            for need in setting.needs:
                if need.key in SWITCHES_OF_USER_CODE:
                    continue
                groups.setdefault(f"{need.key}: {need}", (need, []))[1].append(setting)
    return groups


NEEDS = settings_by_need()


def argument_variants(settings: list[Setting]) -> Iterator[list[str]]:
    """Yield arguments that set every setting to a value other than its default."""
    valid = {
        setting.key: [value for value in values_of(setting) if is_accepted(setting.key, value)]
        for setting in settings
    }
    for number in range(max(map(len, valid.values()))):
        pairs = [(key, values[number % len(values)]) for key, values in valid.items() if values]
        yield [f"--{key}={value}" for key, value in pairs]


def arguments_without(need: Need) -> list[str]:
    """Return arguments that do not meet a need."""
    for line in ("", *OFF.get(need.key, ())):
        config = load_config(line.split())
        if not need.is_met(config.value_of(need.key), config):
            return line.split()
    raise AssertionError(f"no line of OFF disables {need}")


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


@pytest.mark.parametrize("name", NEEDS)
def test_a_disabled_feature_refuses_none_of_its_settings(name: str) -> None:
    need, settings = NEEDS[name]
    arguments = ["--training.steps", "1000", *arguments_without(need)]
    keys = {setting.key for setting in settings}
    for variant in argument_variants(settings):
        config = load_config([*arguments, *variant])
        problems = check_config(config, None, training=True, device_type="cpu")
        errors = [problem for problem in problems if problem.severity == "error"]
        refused = [problem for problem in errors if problem.key in keys]
        assert not refused, [*variant, *map(str, refused)]


def test_one_warning_lists_settings_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "base.toml"
    file.write_text(
        '[training]\nsteps = 1000\n[quantize.linear.float8]\nfilter_fqns = ["output"]\n'
    )
    arguments = (
        "--compile.backend eager --parallelism.enable_async_tensor_parallel --checkpoint.load_only"
    )
    _, warnings = load_checked(
        ["--job.config_file", str(file), *arguments.split()], 1, training=True
    )
    (text,) = map(str, warnings)
    assert text.startswith("4 settings have no effect in this run: ") and "\n" not in text
    assert 'compile.backend = "eager" (command line, it needs compile.enable = true)' in text
    assert f'filter_fqns = ["output"] ({file}, it needs model.converters' in text
    assert "enable_async_tensor_parallel = true (command line, it needs parallelism.tensor_" in text
    assert "checkpoint.load_only = true (command line, it needs checkpoint.enable = true)" in text


# Settings of TorchTitan's three dense Qwen3 presets. Earlier versions refused them or warned.
PRESETS = {
    "0.6B": (4, "selective", "op", 8),
    "1.7B": (4, "selective", "op", 8),
    "32B": (2, "full", "op", 8),
}


@pytest.mark.parametrize("flavor", PRESETS)
def test_presets_with_export_dtype_and_disabled_checkpoints_pass(
    flavor: str, tmp_path: Path
) -> None:
    batch_size, mode, option, ranks = PRESETS[flavor]
    file = tmp_path / "preset.toml"
    file.write_text(f"""
        [model]
        name = "qwen3"
        flavor = "{flavor}"
        hf_assets_path = "{tmp_path}/assets"
        [training]
        local_batch_size = {batch_size}
        seq_len = 4096
        steps = 3000
        dataset = "c4"
        [checkpoint]
        enable = false
        interval = 500
        last_save_model_only = false
        export_dtype = "float16"
        async_mode = "disabled"
        [activation_checkpoint]
        mode = "{mode}"
        selective_ac_option = "{option}"
        [quantize.linear.float8]
        enable_fsdp_float8_all_gather = false
        filter_fqns = ["output"]
    """)
    config, _ = load_checked(
        ["--job.config_file", str(file)], ranks, training=False, device_type="cuda"
    )
    assert config.checkpoint.export_dtype == "float16"
    with pytest.raises(ConfigError, match="export_dtype"):
        load_config(["--job.config_file", str(file), "--checkpoint.enable"])


def test_needs_name_settings_of_the_schema() -> None:
    assert len(NEEDS) > 40
    for need, _ in NEEDS.values():
        assert find(tuple(need.key.split("."))) is not None, need
