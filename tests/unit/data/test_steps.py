"""Steps with growing batches and skipped steps read the same samples as a plain loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_like.config.sections_training import Training
from torchtitan_like.data.batches.iterators import StepPositions

SIZES = [(1, 2), (4, 3), (6, 8)]


def unskipped_steps(sizes: Sequence[tuple[int, int]], num_steps: int) -> list[list[int]]:
    """Return the positions of the first steps of a run without skipped steps."""
    steps, position = [], 0
    for step in range(1, num_steps + 1):
        size = [size for first, size in sizes if first <= step][-1]
        steps.append(list(range(position, position + size)))
        position += size
    return steps


def read_steps(positions: StepPositions, num_steps: int, start: int = 0) -> list[list[int]]:
    steps = []
    for _ in range(num_steps):
        steps.append(positions.positions_from(start).tolist())
        start = steps[-1][-1] + 1
    return steps


growing = st.lists(st.integers(1, 4), max_size=3).flatmap(
    lambda gaps: st.lists(st.integers(1, 9), min_size=len(gaps) + 1, max_size=len(gaps) + 1).map(
        lambda sizes: [(1 + sum(gaps[:i]), size) for i, size in enumerate(sizes)]
    )
)
pairs = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), max_size=3).map(
    lambda drawn: sorted([first, first + length] for first, length in drawn)
)


@given(sizes=growing, skipped=pairs, start=st.integers(0, 40), num_steps=st.integers(0, 40))
def test_many_steps_are_passed_at_once(
    sizes: list[tuple[int, int]], skipped: list[list[int]], start: int, num_steps: int
) -> None:
    positions = StepPositions(sizes, skipped)
    steps = read_steps(positions, num_steps, start)
    assert positions.position_after(start, num_steps) == (steps[-1][-1] + 1 if steps else start)


def test_a_distant_step_takes_no_loop() -> None:
    """Steps 1 to 5 of the grid have 12 samples, all later ones 8; two steps are skipped."""
    num_later = 10**15 + 2 - 5
    assert StepPositions(SIZES, [[3, 4]]).position_after(0, 10**15) == 12 + 8 * num_later


@given(sizes=growing, skipped=pairs)
def test_steps_read_the_samples_that_are_not_skipped(
    sizes: list[tuple[int, int]], skipped: list[list[int]]
) -> None:
    kept = unskipped_steps(sizes, 60)
    for first, last in skipped:  # each pair counts the steps that remain after earlier pairs
        del kept[first - 1 : last]
    positions = StepPositions(sizes, skipped)
    assert read_steps(positions, 20) == kept[:20]
    for step, positions_read in enumerate(kept[:20], start=1):
        assert (
            positions.num_started(positions_read[0]) == step - 1
            and positions.num_started(positions_read[-1] + 1) == step
        )
        assert positions.first_position(step) == positions_read[0]


def test_reading_continues_from_a_position_between_two_steps() -> None:
    assert read_steps(StepPositions(SIZES), 4, start=3) == [[3, 4], [5, 6], [7, 8, 9], [10, 11, 12]]
    assert read_steps(StepPositions([(1, 4)], [[2, 3]]), 2, start=2) == [
        [2, 3, 12, 13],
        [14, 15, 16, 17],
    ]


@pytest.mark.parametrize(
    ("ramp", "last"),
    [([8, 8, 100], 32), ([2, 3, 50], 20), ([4, 4, 1], 64), ([1, 1, 7], 2), ([16, 16, 10_000], 48)],
)
def test_a_batch_size_ramp_equals_megatrons_ramp(ramp: list[int], last: int) -> None:
    """A step has start + increment x (ramp parts already read) samples, at most the last size."""
    start, increment, samples = ramp
    num_increments = (last - start) // increment
    sizes = Training(batch_ramp=ramp, global_batch_size=last).batch_sizes(last)
    num_read = 0
    for step, positions_read in enumerate(unskipped_steps(sizes, 2000), start=1):
        num_grown = min(num_read * num_increments // samples, num_increments)
        assert len(positions_read) == start + increment * num_grown, f"step {step}"
        num_read += len(positions_read)
    assert sizes[-1][1] == last and Training().batch_sizes(last) == [(1, last)]
