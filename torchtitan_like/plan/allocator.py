"""Replay allocations in a model of PyTorch's CUDA caching allocator: what is reserved.

A GPU runs out of memory when the *reserved* bytes exceed its memory, not the live ones. The rules
are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13):

- Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB and larger ones have pools of their own.
- Each stream has its own pools. Memory freed on one stream is not given to another.
- The smallest free block that is large enough is used (best fit), and its rest is split off.
  Adjacent free blocks join.
- With expandable segments, a pool is one address range, which grows at its end by pages of 2 MiB
  (small blocks) or 20 MiB. The free block at its end counts as endless, so any other goes first.
- Without them, a segment has 2 MiB (small blocks), 20 MiB (blocks below 10 MiB), or the block's
  size rounded up to 2 MiB. Of a large block, a rest of at most 1 MiB is not split off.
- Reserved memory is never returned, as long as it suffices.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from torchtitan_like.plan.record import Alloc, Recording
from torchtitan_like.util.units import MIB

ROUNDED_TO = 512
SMALL = MIB  # largest block of a small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_OWN_SEGMENT = 10 * MIB
OWN_SEGMENT_ROUNDED_TO = 2 * MIB


class _Pool:
    """The blocks of one stream and one class of sizes."""

    def __init__(self, *, is_small: bool, is_expandable: bool) -> None:
        self.reserved = 0
        self._is_small = is_small
        self._is_expandable = is_expandable
        self._min_rest = ROUNDED_TO if is_small or is_expandable else SMALL + 1
        self._end = 0  # of the highest segment
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}  # of free blocks, by address
        self._start_of: dict[int, int] = {}  # of free blocks, by their end
        self._used: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """Return the address of a block."""
        found = self._best_fit(size)
        if found is None:
            found = self._extend(size) if self._is_expandable else self._add_segment(size)
        available, address = found
        self._remove(available, address)
        if available - size >= self._min_rest:
            self._add(address + size, available - size)
        else:
            size = available
        self._used[address] = size
        return address

    def free(self, address: int) -> None:
        """Return a block, joined with its free neighbors."""
        size = self._used.pop(address)
        if (start := self._start_of.get(address)) is not None:
            size += self._size_at[start]
            self._remove(self._size_at[start], start)
            address = start
        if (next_size := self._size_at.get(address + size)) is not None:
            self._remove(next_size, address + size)
            size += next_size
        self._add(address, size)

    def _best_fit(self, size: int) -> tuple[int, int] | None:
        index = bisect.bisect_left(self._free, (size, -1))
        is_endless = self._is_expandable and index < len(self._free)
        if is_endless and sum(self._free[index]) == self._end:
            index += 1
        return self._free[index] if index < len(self._free) else None

    def _extend(self, size: int) -> tuple[int, int]:
        start = self._start_of.get(self._end)
        available = 0 if start is None else self._size_at[start]
        page = SMALL_SEGMENT if self._is_small else LARGE_SEGMENT
        grown = max(0, -(-(size - available) // page) * page)
        if start is None:
            start = self._end
        elif grown:
            self._remove(available, start)
        if grown:
            self._end += grown
            self.reserved += grown
            self._add(start, available + grown)
        return available + grown, start

    def _add_segment(self, size: int) -> tuple[int, int]:
        if self._is_small:
            segment = SMALL_SEGMENT
        elif size < MIN_OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // OWN_SEGMENT_ROUNDED_TO) * OWN_SEGMENT_ROUNDED_TO
        start = self._end + ROUNDED_TO  # a gap, so that blocks of two segments never join
        self._end = start + segment
        self.reserved += segment
        self._add(start, segment)
        return segment, start

    def _add(self, address: int, size: int) -> None:
        bisect.insort(self._free, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _remove(self, size: int, address: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size, address))]
        del self._size_at[address]
        del self._start_of[address + size]


@dataclass(frozen=True)
class Reserved:
    """The allocator after a recording. num_bytes: reserved.

    active: peak of the rounded live bytes. by_stream: reserved bytes of each stream's pools.
    """

    num_bytes: int
    active: int
    by_stream: dict[str, int]


def replay(recording: Recording, *, is_expandable: bool = True) -> Reserved:
    """Allocate and free as recorded, up to the last mark.

    is_expandable: with `PYTORCH_ALLOC_CONF=expandable_segments:True`, which `process_start` sets.
    """
    pools: dict[tuple[int, bool], _Pool] = {}
    blocks: dict[int, tuple[_Pool, int, int]] = {}
    active = peak = 0
    events = iter(recording.events)
    position = 0
    for mark in recording.marks:
        while position < mark.num_events:
            event = next(events)
            position += 1
            if isinstance(event, Alloc):
                if event.is_host:
                    continue
                size = -(-event.num_bytes // ROUNDED_TO) * ROUNDED_TO
                key = event.stream, size <= SMALL
                if key not in pools:
                    pools[key] = _Pool(is_small=key[1], is_expandable=is_expandable)
                blocks[event.id] = pools[key], pools[key].allocate(size), size
                active += size
                peak = max(peak, active)
            elif event.id in blocks:
                pool, address, size = blocks.pop(event.id)
                pool.free(address)
                active -= size
    by_stream: dict[str, int] = {}
    for (stream, _), pool in pools.items():
        name = recording.streams[stream]
        by_stream[name] = by_stream.get(name, 0) + pool.reserved
    return Reserved(sum(by_stream.values()), peak, by_stream)
