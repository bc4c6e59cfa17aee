"""Which rows of a curve are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_like.report.summary import decimate, moving_mean

VALUES = st.lists(st.floats(width=32), max_size=400)
LIMITS = st.integers(4, 60)


@given(VALUES, LIMITS)
def test_points_are_sorted_rows_within_the_limit(values: list[float], limit: int) -> None:
    kept = decimate(np.array(values), limit)
    assert len(kept) <= limit
    assert list(kept) == sorted(set(kept.tolist()))
    assert np.isfinite(np.array(values)[kept]).all()


@given(VALUES, LIMITS)
def test_extremes_and_ends_are_kept(values: list[float], limit: int) -> None:
    array = np.array(values)
    finite = np.flatnonzero(np.isfinite(array))
    kept = decimate(array, limit)
    if len(finite):
        assert {finite[0], finite[-1]} <= set(kept)
        assert array[kept].min() == array[finite].min()
        assert array[kept].max() == array[finite].max()


@given(VALUES)
def test_a_short_curve_is_complete(values: list[float]) -> None:
    array = np.array(values)
    assert list(decimate(array, 400)) == np.flatnonzero(np.isfinite(array)).tolist()


@given(st.integers(0, 9_999), st.sampled_from([-1.0, 1.0]))
def test_a_spike_of_one_row_is_kept(row: int, sign: float) -> None:
    values = np.sin(np.arange(10_000.0))
    values[row] = 50 * sign
    assert row in decimate(values, 200)


def test_each_part_of_a_long_curve_is_drawn() -> None:
    kept = decimate(np.sin(np.arange(100_000.0)), 2_000)
    assert len(kept) > 1_900 and np.diff(kept).max() < 300


def test_the_moving_mean_is_of_finite_values() -> None:
    means = moving_mean(np.array([1.0, 3.0, np.nan, 5.0, np.inf, 7.0]), 2)
    assert means[[0, 1, 3, 5]] == pytest.approx([1.0, 2.0, 4.0, 6.0])
    assert np.isnan(means[[2, 4]]).all()
    centered = moving_mean(np.arange(9.0), 4, is_centered=True)
    assert centered.tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 6.5, 7.0]
