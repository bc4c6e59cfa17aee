"""The shuffled order is a bijection that depends on size, seed and epoch, not on the platform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_like.data.samples.order import BLOCK_SAMPLES, WINDOW_BLOCKS, shuffled
from torchtitan_like.util.splitmix import mix64

WINDOW = BLOCK_SAMPLES * WINDOW_BLOCKS
AROUND_BORDERS = [
    1,
    2,
    3,
    4,
    63,
    64,
    65,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    WINDOW + 63,
    WINDOW + 65,
    3 * WINDOW + 100,
]


def epoch_order(num_samples: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return shuffled(np.arange(num_samples), num_samples, seed, epoch)


@given(
    st.integers(1, 20_000) | st.sampled_from(AROUND_BORDERS),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_bijection_for_every_size(num_samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_order(num_samples, seed, epoch)), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", AROUND_BORDERS)
def test_the_order_is_a_bijection_at_block_and_window_borders(num_samples: int) -> None:
    assert np.array_equal(np.sort(epoch_order(num_samples, 5, 3)), np.arange(num_samples))


@given(st.integers(1, 100_000), st.data())
@settings(max_examples=50, deadline=None)
def test_a_single_position_equals_its_entry_in_the_epoch(
    num_samples: int, data: st.DataObject
) -> None:
    positions = np.array(
        data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20))
    )
    assert np.array_equal(
        shuffled(positions, num_samples, 1, 2), epoch_order(num_samples, 1, 2)[positions]
    )


def test_the_order_is_the_same_on_every_platform_and_version() -> None:
    # Pinned: a change needs a new PERMUTATION_VERSION, or resumed runs read in another order.
    assert epoch_order(10, seed=42).tolist() == [9, 6, 8, 1, 3, 2, 7, 0, 5, 4]
    distant = shuffled(np.array([0, 10**6, 10**10, 10**12 - 1]), 10**12, seed=2**64 - 1, epoch=3)
    assert distant.tolist() == [300339447131, 114656539868, 621753007690, 21946776942]


def test_mix64_is_splitmix64() -> None:
    # Test vectors of the reference implementation: first outputs from states 0 and 1234567.
    assert mix64(np.array([0, 1234567], np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        6457827717110365317,
    ]


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_every_sample_can_be_at_every_position() -> None:
    # 2,000 epochs of 20 samples: each (position, sample) pair is expected 100 +- 10 times.
    counts = np.zeros((20, 20), int)
    for epoch in range(2000):
        counts[np.arange(20), epoch_order(20, 0, epoch)] += 1
    assert counts.min() > 50 and counts.max() < 150


def test_neighbors_are_separated() -> None:
    order = epoch_order(5_000)
    # In a random order, the number of adjacent neighbors is Poisson-distributed with mean 2.
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 15


def test_a_window_reads_few_regions_of_the_file() -> None:
    num_samples = 20 * WINDOW
    order = epoch_order(num_samples)[:WINDOW]
    num_regions = 1 + np.count_nonzero(np.diff(np.sort(order)) != 1)
    assert num_regions <= WINDOW_BLOCKS
    # The regions are spread over the whole file.
    assert len(set(order // WINDOW)) == 20
