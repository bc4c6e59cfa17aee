"""Ranks that have read other settings end together, with their names; where things lie is each node's own."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.config.agreement import _shared, check_agreement
from torchtitan_like.config.fields import all_settings


def compared(one: str, other: str) -> str:
    """What the first of two ranks tells; the second is asked what it would say."""
    first, second = (load_config(line.split()) for line in (one, other))

    def gather(value: Any) -> list[Any]:
        theirs = _shared(second)
        return [value, theirs if isinstance(value, dict) else b"the digest of theirs"]

    with pytest.raises(ConfigError) as refused:
        check_agreement(first, gather)
    return str(refused.value)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("--optimizer.lr 0.1", "optimizer.lr = 0.0008: expected the same on every rank; rank 1 has 0.1"),
        ("--model.args.dim 64", "model.args.dim: expected the same on every rank; rank 1 has 64"),
        ("--data.sources.a.path x", "data.sources.a.weight: expected the same on every rank; rank 1 has 1.0"),
        ("--debug.seed 1", "debug.seed: expected the same on every rank; rank 1 has 1"),
    ],
)
def test_settings_that_differ_are_told_by_name(other: str, told: str) -> None:
    assert told in compared("--training.steps 3", f"--training.steps 3 {other}")


def test_the_same_settings_in_another_order_are_the_same() -> None:
    """And 500000 is 500000.0. But texts are read in the order in which they stand."""
    one, other = (
        "--model.args.dim 256 --model.args.rope_theta 500000",
        "--model.args.rope_theta 500000.0 --model.args.dim 256",
    )
    first, second = (load_config(line.split()) for line in (one, other))
    check_agreement(first, lambda ours: [ours, _shared(second) if isinstance(ours, dict) else b"another"])
    one, other = (f"--validation.sources.{a}.path x --validation.sources.{b}.path x" for a, b in ("ab", "ba"))
    assert 'validation.sources = ["a", "b"]: expected the same on every rank; rank 1 has ["b", "a"]' in compared(
        one, other
    )


def test_places_are_each_nodes_own() -> None:
    line = "--job.dump_folder {0} --model.hf_assets_path {0} --data.sources.a.path {0} --data.cache_folder {0}"
    ours, theirs = (_shared(load_config(line.format(place).split())) for place in ("a", "b"))
    assert ours == theirs and "data.sources.a.format" in ours


def test_all_other_settings_are_compared() -> None:
    keys = {setting.key for setting in all_settings() if "<" not in setting.key and not setting.is_free}
    keys -= {"data.sources", "validation.sources"}
    left_out = {key.rsplit(".", 1)[1] for key in keys - _shared(load_config([])).keys()}
    assert left_out == {
        "cache_folder", "config_file", "dataset_path", "description", "dump_folder", "folder", "hf_assets_path",
        "initial_load_path", "kill_switch_path", "pipeline_parallel_schedule_csv", "save_config_file",
        "save_memory_snapshot_folder", "save_switch_path", "save_tb_folder", "save_traces_folder", "tokenizer_path",
    }  # fmt: skip
