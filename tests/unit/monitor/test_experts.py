"""The metrics of a mixture of experts equal numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from torchtitan_like.monitor.experts import (
    DEAD_AFTER,
    ExpertMetrics,
    ep_imbalance,
    load_entropy,
    max_violation,
)
from torchtitan_like.monitor.sinks import step_scalars


@pytest.mark.parametrize(
    ("counts", "violation", "entropy"),
    [
        ([5, 5, 5, 5], 0.0, 1.0),
        ([20, 0, 0, 0], 3.0, 0.0),
        ([10, 10, 0, 0], 1.0, 0.5),
        ([6, 2], 0.5, -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))),
        ([0, 0], 0.0, 1.0),
        ([7], 0.0, 1.0),
    ],
)
def test_violation_and_entropy_of_expert_loads(
    counts: list[int], violation: float, entropy: float
) -> None:
    assert max_violation(counts) == pytest.approx(violation)
    assert load_entropy(counts) == pytest.approx(entropy)


def test_a_row_summarizes_two_layers() -> None:
    row = ExpertMetrics([1, 3]).row(
        [[5, 5, 5, 5], [20, 0, 0, 0]], [1.0, 4.0], [1.0, 2.0], [0.25, 0.5]
    )
    assert row == {
        "max_violation": 3.0,
        "mean_max_violation": 1.5,
        "load_entropy": 0.5,
        "dead_experts": 3,
        "dropped_tokens": 0,
        "router_z": 2.5,
        "aux_loss": 1.5,
        "bias_range": 0.5,
        "max_violation_by_layer": [0.0, 3.0],
    }


@pytest.mark.parametrize(
    ("counts", "num_ranks", "imbalance"),
    [
        ([5, 5, 5, 5], 2, 1.0),
        ([10, 0, 0, 10], 2, 1.0),  # experts are uneven, ranks are not
        ([6, 2, 1, 3], 2, 8 / 6),
        ([6, 2, 1, 3], 4, 2.0),
        ([0, 0, 7, 5], 2, 2.0),
        ([0, 0, 0, 0], 2, 1.0),
    ],
)
def test_imbalance_of_expert_parallel_ranks(
    counts: list[int], num_ranks: int, imbalance: float
) -> None:
    assert ep_imbalance(counts, num_ranks) == pytest.approx(imbalance)


def test_a_row_has_the_imbalance_of_the_worst_layer_with_expert_parallelism() -> None:
    choices, router_z = [[6, 2, 1, 3], [3, 3, 3, 3]], [0.0, 0.0]
    row = ExpertMetrics([1, 2], expert_parallel=2).row(choices, router_z, None, None)
    assert row["ep_imbalance"] == pytest.approx(8 / 6)
    assert step_scalars({"moe": row})["moe/ep_imbalance"] == row["ep_imbalance"]
    assert "ep_imbalance" not in ExpertMetrics([1, 2]).row(choices, router_z, None, None)


def test_the_fullest_expert_is_described() -> None:
    experts = ExpertMetrics([1, 3])
    assert experts.fullest_expert == ""
    experts.row([[5, 5, 5, 5], [2, 2, 10, 2]], [1.0, 4.0], None, None)
    assert "expert 2 of layer 3 computed 2.5 times as many" in experts.fullest_expert


def test_an_expert_without_tokens_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Expert 1 receives a token from time to time, expert 2 never does."""
    experts = ExpertMetrics([7])
    for step in range(3 * DEAD_AFTER):
        counts = [[4, int(step % DEAD_AFTER == 2), 0]]
        experts.row(counts, [0.0], None, None)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (step + 1 >= DEAD_AFTER)
    assert "2 of layer 7." in warnings[0] and "load_balance" in warnings[0]
