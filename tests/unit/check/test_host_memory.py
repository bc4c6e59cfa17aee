"""The host memory of CPU offload counts the states that each optimizer keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from torchtitan_like.check.offload_memory import STATES, host_memory_need, state_bytes
from torchtitan_like.config import load_config
from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim.optimizer import OPTIMIZERS, OptimizerContext, build_optimizer
from torchtitan_like.util.shards import local_positions
from torchtitan_like.util.units import GIB

MATRIX = "layers.0.wq.weight"
CASES = [
    (settings, dtype)
    for settings in (
        {"name": "Adam"},
        {"name": "AdamW"},
        {"name": "AdamW", "state_dtype": "bfloat16"},
        {"name": "AdamW", "state_dtype": "float32", "bf16_rounding": "stochastic"},
        {"name": "AdamW", "bf16_rounding": "kahan"},
        {"name": "Lion"},
        {"name": "Lion", "state_dtype": "bfloat16"},
        {"name": "Lion", "bf16_rounding": "kahan"},
        {"name": "Muon"},
        {"name": "AdamW8bit"},
        {"name": "AdamW8bit", "adamw8bit_block_size": 64, "bf16_rounding": "kahan"},
    )
    for dtype in ("bfloat16", "float32", "float64")
]


@pytest.mark.parametrize(("settings", "dtype"), CASES)
def test_states_are_counted_as_the_optimizers_build_them(
    settings: dict[str, Any], dtype: str
) -> None:
    if settings["name"] == "AdamW8bit":
        pytest.importorskip("torchao")
    section = Optimizer(**settings)
    matrix = torch.nn.Parameter(torch.zeros(32, 256, dtype=getattr(torch, dtype)))
    context = OptimizerContext(
        (("layers.*.wq.weight", "column"),),
        partial(MatrixOwners, group=None),
        local_positions,
        torch.device("cpu"),
        seed=0,
        settings={},
    )
    optimizer = build_optimizer([(MATRIX, matrix)], section, context)
    tensors = [value for value in optimizer.state_dict().values() if value.ndim]
    expected = sum(value.nbytes for value in tensors) / matrix.numel()
    assert state_bytes(section, dtype) == expected


def test_every_optimizer_has_its_states() -> None:
    assert STATES.keys() == OPTIMIZERS.keys()


def test_the_smallest_states_of_several_optimizers_count() -> None:
    groups = {"head": {"parameters": ["output.*"], "name": "Lion"}}
    assert state_bytes(Optimizer(name="AdamW", groups=groups), "float32") == 4
    assert state_bytes(Optimizer(name="Lion", groups=groups), "float32") == 4


def test_the_need_of_a_node() -> None:
    """2^28 parameters on 2 ranks: weights, gradients, and Lion's mean in bfloat16."""
    line = "--training.enable_cpu_offload --optimizer.name Lion --optimizer.state_dtype bfloat16"
    need = host_memory_need(load_config(line.split()), 2**28, 2, 2)
    assert need is not None and need.of_node == 2.5 * GIB
    assert "optimizer states 0.25 GiB" in str(need)
    assert "averages" not in str(need)
    assert host_memory_need(load_config([]), 2**28, 2, 2) is None


@pytest.mark.parametrize(("dtype", "gib"), [("bfloat16", 0.5), ("float32", 0.5), ("float64", 1.0)])
def test_averaged_weights_need_host_memory(dtype: str, gib: float) -> None:
    line = f"--training.enable_cpu_offload --training.dtype {dtype}"
    without = host_memory_need(load_config(line.split()), 2**28, 2, 2)
    need = host_memory_need(load_config(f"{line} --ema.enable".split()), 2**28, 2, 2)
    assert need is not None and without is not None
    assert need.of_node - without.of_node == 2 * gib * GIB
    assert f"+ averages {gib:.2f} GiB" in str(need)
