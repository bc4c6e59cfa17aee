"""Align the clocks of ranks by the ends of their collectives, and find the rank that others wait for.

An all-reduce, all-gather or reduce-scatter ends on all ranks at about the same time. So the
difference between its ends on two ranks is about the difference between their clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.report.trace.spans import Spans
from torchtitan_like.report.trace.times import Key, RankTimes


@dataclass(frozen=True)
class Clock:
    """The clock of a rank. offset: what to add to its times for the reference's, microseconds.

    reference: the rank with which it was compared; None for the first rank, and for a rank without a
    common collective. error: half of the `num_collectives` end within this time of each other,
    microseconds.
    """

    offset: float
    reference: int | None = None
    num_collectives: int = 0
    error: float = 0.0


@dataclass(frozen=True)
class Lateness:
    """How often a rank was the last to start a collective, and how long the others waited for it.

    waited: rank-microseconds, summed over all other ranks of its collectives.
    """

    rank: int
    num_last: int
    num_collectives: int
    waited: float


def align(ranks: Sequence[RankTimes], bases: Mapping[int, float]) -> dict[int, Clock]:
    """Return the clock of each rank.

    bases: by rank, what to add to its times if all clocks were right, microseconds. A rank is
    compared with a rank of one of its process groups, if these are known. Ranks without a common
    group are compared by the collectives of unknown groups.
    """
    by_rank = {times.rank: times for times in ranks}
    clocks = {ranks[0].rank: Clock(bases[ranks[0].rank])}
    for has_group in (True, False):
        pending = list(clocks)
        while pending:
            reference = pending.pop(0)
            for rank in sorted(by_rank.keys() - clocks.keys()):
                clock = _compare(by_rank[reference], by_rank[rank], clocks[reference], has_group)
                if clock is not None:
                    clocks[rank] = clock
                    pending.append(rank)
    return {rank: clocks.get(rank, Clock(bases[rank])) for rank in by_rank}


def _compare(reference: RankTimes, other: RankTimes, clock: Clock, has_group: bool) -> Clock | None:
    """Return the clock of `other`; None without a common collective."""
    differences = [
        ends[0][:, 1] - ends[1][:, 1]
        for key in reference.collectives.keys() & other.collectives.keys()
        if bool(key.group) == has_group and len(ends := _matched([reference, other], key)) == 2
    ]
    if not differences:
        return None
    offset, error = _densest_half(np.concatenate(differences))
    num_collectives = sum(map(len, differences))
    return Clock(clock.offset + offset, reference.rank, num_collectives, error)


def _densest_half(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the median of the shortest interval with half of the values, and half its length.

    Collectives of different groups, which were compared by mistake, do not change it.
    """
    ordered = np.sort(values)
    num_kept = len(ordered) // 2 + 1
    widths = ordered[num_kept - 1 :] - ordered[: len(ordered) - num_kept + 1]
    first = int(widths.argmin())
    return float(np.median(ordered[first : first + num_kept])), float(widths[first]) / 2


def _matched(ranks: Sequence[RankTimes], key: Key) -> list[Spans]:
    """Return the collectives of a key that the ranks have in common, one set for each rank.

    Ranks with different numbers of them cannot be compared, except if a trace is truncated.
    """
    members = [times for times in ranks if key in times.collectives]
    found = [times.collectives[key] for times in members]
    counts = set(map(len, found))
    if len(counts) > 1 and not any(times.is_damaged for times in members):
        return []
    return [spans[: min(counts)] for spans in found]


def find_straggler(ranks: Sequence[RankTimes], clocks: Mapping[int, Clock]) -> Lateness | None:
    """Return the rank for which the others waited longest; None without a common collective."""
    num_last = {times.rank: 0 for times in ranks}
    waited = {times.rank: 0.0 for times in ranks}
    num_collectives = 0
    for key in dict.fromkeys(key for times in ranks for key in times.collectives):
        members = [times for times in ranks if key in times.collectives]
        matched = _matched(members, key)
        if len(matched) < 2:
            continue
        spans = np.stack(
            [own + clocks[times.rank].offset for own, times in zip(matched, members, strict=True)]
        )
        starts, ends = spans[:, :, 0], spans[:, :, 1]
        # Ranks of different groups have the same key if the group is unknown.
        is_joint = starts.max(axis=0) < ends.min(axis=0)
        num_collectives += int(is_joint.sum())
        for index in np.flatnonzero(is_joint):
            last = members[int(starts[:, index].argmax())].rank
            num_last[last] += 1
            waited[last] += float((starts[:, index].max() - starts[:, index]).sum())
    if not num_collectives:
        return None
    rank = max(waited, key=lambda rank: (waited[rank], -rank))
    return Lateness(rank, num_last[rank], num_collectives, waited[rank])
