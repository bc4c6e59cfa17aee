"""`benchmarks/calibrate.py` measures real gloo ranks."""

from __future__ import annotations

import torch

from benchmarks.calibrate import Measured, Sizes, measure_machine
from tests.harness.rank_pool import run_ranks
from torchtitan_like.plan.gpus import COLLECTIVES

TINY = Sizes(((64, 32, 32),), (torch.float32,), (64, 32), (2**10, 2**14), ((16, 4), (32, 8)))


def measure() -> Measured:
    return measure_machine("cpu", TINY, 0.1)


def test_all_ranks_measure_each_kind_of_collective() -> None:
    first, second = run_ranks(measure, 2)
    assert first == second  # the slowest rank counts on each
    assert first.collectives.keys() == set(COLLECTIVES)
    assert (first.num_ranks, first.ranks_per_node) == (2, 2)
    for collective in first.collectives.values():
        assert (collective.small[0], collective.large[0]) == TINY.messages
        assert collective.small[1] > 0 and collective.large[1] > 0
