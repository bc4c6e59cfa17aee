"""All ranks refuse settings that differ between ranks, except for paths."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.handover import check_agreement, shared_settings


def error_of(one: str, other: str) -> str:
    """Return the error of rank 0 if two ranks have these command lines."""
    first, second = (load_config(line.split()) for line in (one, other))

    def gather(value: Any) -> list[Any]:
        return [value, shared_settings(second) if isinstance(value, dict) else b"another digest"]

    with pytest.raises(ConfigError) as refused:
        check_agreement(first, gather)
    return str(refused.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "--optimizer.lr 0.1",
            "optimizer.lr = 0.0008: expected the same on every rank; rank 1 has 0.1",
        ),
        ("--model.args.dim 64", "model.args.dim: expected the same on every rank; rank 1 has 64"),
        (
            "--data.sources.a.path x",
            "data.sources.a.weight: expected the same on every rank; rank 1 has 1.0",
        ),
        ("--debug.seed 1", "debug.seed: expected the same on every rank; rank 1 has 1"),
    ],
)
def test_a_different_setting_is_reported(other: str, message: str) -> None:
    assert message in error_of("--training.steps 3", f"--training.steps 3 {other}")


def test_the_order_of_settings_may_differ_except_for_sources() -> None:
    """Integers equal floats: 500000 and 500000.0."""
    one, other = (
        "--model.args.dim 256 --model.args.rope_theta 500000",
        "--model.args.rope_theta 500000.0 --model.args.dim 256",
    )
    first, second = (load_config(line.split()) for line in (one, other))
    check_agreement(
        first,
        lambda value: [value, shared_settings(second) if isinstance(value, dict) else b"another"],
    )
    one, other = (
        f"--validation.sources.{a}.path x --validation.sources.{b}.path x" for a, b in ("ab", "ba")
    )
    assert (
        'validation.sources = ["a", "b"]: expected the same on every rank; rank 1 has ["b", "a"]'
        in error_of(one, other)
    )


def test_each_node_may_have_its_own_paths() -> None:
    line = "--job.dump_folder {0} --model.hf_assets_path {0} --data.sources.a.path {0} --data.cache_folder {0}"
    first, second = (shared_settings(load_config(line.format(path).split())) for path in "ab")
    assert first == second and "data.sources.a.format" in first


def test_all_other_settings_are_compared() -> None:
    keys = {
        setting.key for setting in all_settings() if "<" not in setting.key and not setting.is_free
    }
    keys -= {"data.sources", "validation.sources", "optimizer.groups"}
    may_differ = {key.rsplit(".", 1)[1] for key in keys - shared_settings(load_config([])).keys()}
    assert may_differ == {
        "cache_folder", "config_file", "dataset_path", "description", "dump_folder", "folder", "hf_assets_path",
        "initial_load_path", "kill_switch_path", "pipeline_parallel_schedule_csv", "reference_curve", "save_config_file",
        "save_memory_snapshot_folder", "save_switch_path", "save_tb_folder", "save_traces_folder", "show_results",
        "tokenizer_path",
    }  # fmt: skip
