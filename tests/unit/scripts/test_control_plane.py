"""The scaled costs of the control plane, and the table of the documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import control_plane as plane
from tests.harness.runner import ROOT

COSTS = json.loads((ROOT / "docs/benchmarks/2026-11-25-control-plane.json").read_text())
PAGE = ROOT / "docs/benchmarks/2026-11-25-control-plane.md"


def row(limit: float | None, value: Any) -> plane.Row:
    return plane.Row("", "", value, "s", limit)


def test_the_first_size_above_a_limit_is_exact() -> None:
    assert plane.passed_at(row(100.0, lambda _, n: n), {}) == 101
    assert plane.passed_at(row(100.0, lambda _, n: n**3), {}) == 5
    assert plane.passed_at(row(0.5, lambda _, n: n), {}) == 1
    assert plane.passed_at(row(100.0, lambda _, n: 1.0), {}) is None
    assert plane.passed_at(row(None, lambda _, n: n), {}) is None


def test_slope_of_a_line() -> None:
    assert plane.slope({2: 7.0, 4: 13.0, 8: 25.0}) == pytest.approx((3.0, 1.0))


def test_gloo_bytes_are_counted_over_all_groups_and_peers() -> None:
    """Each of 2 ranks writes an address of 100 + 2 x 8 bytes and reads both."""
    costs = {"gloo_address_bytes": 100.0, "gloo_address_bytes_per_rank": 8.0}
    assert plane.gloo_bytes(costs, 2) == 3 * 2 * 3 * 116


def test_values_that_are_compared_with_a_limit_never_decrease() -> None:
    sizes = [2**power for power in range(3, 21)]
    for each in plane.ROWS:
        if each.limit is None:
            continue
        values = [each.value(COSTS, size) for size in sizes]
        if not each.part.startswith(("Store: CPU of polls", "Heartbeats")):  # they are capped
            assert values == sorted(values), each.part


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12 ms"),
        (1234.0, "s", "1,230 s"),
        (2.5e9, "B", "2.5 GB"),
        (99.7, "", "100"),
        (0.0, "s", "0 s"),
        (18432, "", "18,400"),
    ],
)
def test_values_have_two_or_three_digits(value: float, unit: str, text: str) -> None:
    assert plane.show(value, unit) == text


def test_a_gloo_group_connects_all_ranks_and_a_lazy_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    small, large = plane.open_gloo_group(3, rounds=1), plane.open_gloo_group(6, rounds=1)
    assert large.files - small.files == 3  # a socket for each further peer
    assert large.requests - small.requests == 6  # a wait and a read
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert plane.open_gloo_group(6, rounds=1).files < small.files


def test_the_page_has_the_tables_of_the_committed_costs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for line in (*plane.lines(COSTS), *plane.cost_lines(COSTS)):
        assert line in text
