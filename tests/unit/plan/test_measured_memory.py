"""Dry runs of large models equal what PyTorch's own CUDA allocator reported for the same runs.

docs/benchmarks/2026-11-23-memory.md has the measurements: the shipped trainer, CUDA's caching
allocator, and a device that computes nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.plan.dry_memory import plan_memory
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.util.units import GIB

ROOT = Path(__file__).resolve().parents[3]
# Settings in addition to llama3_8b.toml on 8 GPUs -> GiB reserved and active. The runs with chunks of
# logits in that page were measured before the loss added weight gradients inside its products.
MEASURED = {"--loss.chunk_mib=0": (44.49, 39.73)}


@pytest.mark.nightly
@pytest.mark.parametrize("setting", MEASURED)
def test_reserved_and_active_memory_of_llama3_8b(setting: str) -> None:
    argv = ["--job.config_file", str(ROOT / "train_configs/llama3_8b.toml"), *setting.split()]
    config, _ = load_checked(argv, 8, training=False)
    (memory,) = plan_memory(config, 8, load_gpu("h100-80g"))
    planned = (memory.reserved / GIB, memory.active / GIB)
    assert planned == pytest.approx(MEASURED[setting], abs=0.01)  # the table has two digits
