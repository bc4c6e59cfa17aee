"""Replica checks detect every flipped bit and name the differing rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.resilience import corruption
from torchtitan_like.resilience.corruption import Replicas, bits_hash, differences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_flipped_bit_changes_the_hash(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruption, "BLOCK", 4)
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = weights.view(corruption.INTEGERS[dtype.itemsize]).flatten()
    before, hashes = int(bits_hash(weights)), set()
    for index in range(15):
        for bit in range(8 * dtype.itemsize):
            flip = torch.tensor(
                -(1 << bit) if bit == 8 * dtype.itemsize - 1 else 1 << bit, dtype=bits.dtype
            )
            bits[index] ^= flip
            hashes.add(int(bits_hash(weights)))
            bits[index] ^= flip
    assert before not in hashes and int(bits_hash(weights)) == before


def test_the_hash_depends_on_order_and_sign() -> None:
    assert bits_hash(torch.tensor([1.0, 2.0])) != bits_hash(torch.tensor([2.0, 1.0]))
    assert bits_hash(torch.tensor([0.0])) != bits_hash(torch.tensor([-0.0]))
    assert int(bits_hash(torch.empty(0))) == 0


def test_equal_replicas_exchange_only_one_number() -> None:
    """Names and hashes of all parameters from 16,384 ranks would be gigabytes per rank."""
    gathered: list[torch.Tensor] = []

    class Group:
        def gather(self, local: torch.Tensor) -> torch.Tensor:
            gathered.append(local)
            return torch.stack([local, local])

    world: Any = SimpleNamespace(step_group=Group(), dims=ParallelDims(2, dp_replicate=2))
    Replicas(1, world, [("a", torch.ones(3)), ("b", torch.zeros(2))]).check(step=1)
    assert [local.numel() for local in gathered] == [1]


SAME = {"wq": 1, "wk": 2}
WRONG = {"wq": 1, "wk": 3}


@pytest.mark.parametrize(
    ("hashes", "sets", "expected"),
    [
        ([SAME, SAME], [[0, 1]], []),
        ([SAME, WRONG], [[0, 1]], ["wk on ranks 0, 1 (no majority: one of them)"]),
        ([SAME, WRONG, SAME], [[0, 1, 2]], ["wk on rank 1"]),
        (
            [SAME, WRONG, WRONG, SAME],
            [[0, 1, 2, 3]],
            ["wk on ranks 0, 1, 2, 3 (no majority: one of them)"],
        ),
        (
            [SAME, {"a": 1}, SAME, {"a": 2}],
            [[0, 2], [1, 3]],
            ["a on ranks 1, 3 (no majority: one of them)"],
        ),
        ([SAME, {"wq": 4, "wk": 4}, SAME], [[0, 1, 2]], ["wq, wk on rank 1"]),
    ],
)
def test_the_differing_rank_is_identified(
    hashes: list[dict[str, int]], sets: list[list[int]], expected: list[str]
) -> None:
    assert differences(hashes, sets) == expected


@pytest.mark.parametrize(
    ("freq", "log_freq", "first_step", "num_replicas", "checked"),
    [
        (100, 10, 0, 2, [100, 200, 300]),
        (100, 30, 0, 2, [120, 210, 300]),
        (3, 10, 0, 2, [10, 20, 30]),
        (100, 10, 150, 2, [200, 300]),
        (100, 10, 0, 1, []),
        (0, 10, 0, 2, []),
    ],
)
def test_replicas_are_compared_only_at_log_steps(
    freq: int, log_freq: int, first_step: int, num_replicas: int, checked: list[int]
) -> None:
    group = SimpleNamespace(gather=lambda hashes: torch.stack([hashes] * num_replicas))
    dims = ParallelDims(num_replicas, dp_replicate=num_replicas)
    world: Any = SimpleNamespace(step_group=group, dims=dims)
    replicas, steps = Replicas(freq, world, [("a", torch.ones(3))], first_step), []
    for step in range(first_step + 1, checked[-1] + 1 if checked else 301):
        if step % log_freq == 0 and replicas.are_due(step):
            replicas.check(step)
            steps.append(step)
    assert steps == checked
