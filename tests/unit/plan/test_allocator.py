"""The replay follows the block rules of CUDA's caching allocator."""

from __future__ import annotations

import pytest

from torchtitan_like.plan.allocator import replay
from torchtitan_like.plan.record import Alloc, Free, Recording
from torchtitan_like.util.units import MIB

A, B, C, D = 1, 2, 3, 4


def reserved(*events: tuple[int, float] | tuple[int, float, int] | int, expandable: bool) -> float:
    """Replay (id, MiB, stream) as allocations and ids as frees; return the reserved MiB."""
    recording = Recording()
    recording.streams = ["compute", "gather"]
    for event in events:
        if isinstance(event, int):
            recording.events.append(Free(event, 0))
            continue
        number, size, *stream = event
        recording.events.append(
            Alloc(
                number,
                round(size * MIB),
                *(stream or [0]),
                category="other",
                op="empty",
                module="",
                pass_="forward",
                is_host=False,
                at=0,
            )
        )
    recording.mark("step 1")
    return replay(recording, is_expandable=expandable).num_bytes / MIB


@pytest.mark.parametrize(
    ("size", "classic", "expandable"),
    [(0.001, 2, 2), (1, 2, 2), (3, 20, 20), (9, 20, 20), (11, 12, 20), (21, 22, 40)],
)
def test_a_block_reserves_a_segment_or_pages(
    size: float, classic: float, expandable: float
) -> None:
    assert reserved((A, size), expandable=False) == classic
    assert reserved((A, size), expandable=True) == expandable


@pytest.mark.parametrize("expandable", [True, False])
def test_freed_memory_is_reused_on_its_stream_only(expandable: bool) -> None:
    assert reserved((A, 20), A, (B, 20), expandable=expandable) == 20
    assert reserved((A, 20), A, (B, 20, 1), expandable=expandable) == 40


@pytest.mark.parametrize("expandable", [True, False])
def test_small_and_large_blocks_do_not_share_memory(expandable: bool) -> None:
    assert reserved((A, 20), A, (B, 0.5), expandable=expandable) == 22


def test_adjacent_free_blocks_join() -> None:
    assert reserved((A, 10), (B, 10), A, B, (C, 20), expandable=True) == 20
    # Without expandable segments the blocks of two segments never join.
    assert reserved((A, 20), (B, 20), A, B, (C, 40), expandable=False) == 80


def test_the_smallest_sufficient_block_is_used() -> None:
    # The hole of 6 MiB is used for 5 MiB, so that the one of 10 MiB is left for 10 MiB.
    blocks = [(A, 10), (B, 2), (C, 6), (D, 2), A, C, (5, 5), (6, 10)]
    assert reserved(*blocks, expandable=True) == 20


def test_a_hole_is_used_before_the_end_of_the_range() -> None:
    # 12 MiB is free at the end, and a hole of 16: the smaller end would fit 12, but is endless.
    assert reserved((A, 16), (B, 12), A, (C, 12), (D, 12), expandable=True) == 40


def test_a_rest_of_at_most_1_mib_stays_with_a_large_block_of_a_segment() -> None:
    # 20 MiB hold 19.5 MiB; the rest of 0.5 MiB is no block. A page range splits it off.
    assert reserved((A, 9.5), (B, 9.5), (C, 1), expandable=False) == 22
    assert reserved((A, 19.5), A, (B, 19), (C, 1.0001), expandable=False) == 40


def test_memory_of_the_host_is_not_counted() -> None:
    recording = Recording()
    recording.events.append(Alloc(1, MIB, 0, "other", "empty", "", "forward", True, 0))
    recording.mark("step 1")
    assert replay(recording).num_bytes == 0
