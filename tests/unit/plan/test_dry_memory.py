"""Configurations that a dry run cannot model are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.plan.dry_memory import unsupported
from torchtitan_like.preflight import load_checked

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"


@pytest.mark.parametrize(
    ("name", "setting", "start"),
    [
        ("debug_model", "--activation_checkpoint.mode=full", ""),
        ("debug_model", "--activation_checkpoint.mode=offload", "activation_checkpoint.mode"),
        ("qwen3_moe_debug", "--parallelism.expert_parallel_degree=2", ""),
    ],
)
def test_unsupported_settings_are_named(name: str, setting: str, start: str) -> None:
    argv = ["--job.config_file", str(CONFIGS / f"{name}.toml"), setting]
    config, _ = load_checked(argv, 2, training=False)
    assert unsupported(config)[: len(start) or None] == start
