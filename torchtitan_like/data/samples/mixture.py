"""Which sample of which source stands at a position of the training stream: closed formulas, so that any position is
reached at once.

The stream is a row of *segments*, in each of which the shares are constant. A segment repeats one pattern of
``PATTERN`` positions, in which every source has its share, rounded to a multiple of 1/PATTERN. At every position of a
segment, the number of samples read of a source differs from its rounded share by less than one sample (`_schedule`).
A segment ends where the configured weights change, or behind the
last sample of a source that has been read ``max_epochs`` times: the others then share what was its part. The stream
ends when no source with a weight is left.

Samples of a source are read in that source's own order (`order.shuffled`), epoch after epoch. It is keyed by the
source's name, so that another source beside it changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.samples.order import shuffled
from torchtitan_like.data.samples.packing import NO_SAMPLE

# Changes whenever any position would get another source. Saved with the data position.
MIXTURE_VERSION = 2
PATTERN = 2**16
# Of a source that is read as it comes: its samples are numbered in the order in which they are read.
UNKNOWN_SIZE = 2**48

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Supply:
    """What the order needs to know of a source.

    key: its name, "" where it has none. weight: its share of the tokens, relative to the other weights. labels_per_sample:
    mean number of labels in a sample. max_epochs: 0 is without limit. num_samples: UNKNOWN_SIZE for a stream.
    """

    key: str
    num_samples: int
    labels_per_sample: float
    weight: float = 1.0
    max_epochs: int = 0


@dataclass(frozen=True)
class Origin:
    """Where the pattern begins: a position, and how many samples of each source (by key) lie before it."""

    position: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class _Segment:
    """Positions from ``start`` on; ``counts`` (num_sources,): samples of each source before it. Of the pattern: ``source``
    and ``rank`` (PATTERN,), the how-many-th of its source a position is, and ``per_pattern`` (num_sources,).
    """

    start: int
    counts: Indices
    source: Indices
    rank: Indices
    per_pattern: Indices


class SampleOrder:
    """The sample, by its number in the `JoinedSamples` of the same sources, at each position.

    changes: (position, weights by key) from where on other weights hold, in order of position. end: the position
    behind the last sample, None where there is none. seed None: the samples of a source in the order of its files.
    Raises DataError for weights with which a source would hardly ever be read.
    """

    def __init__(
        self,
        supplies: Sequence[Supply],
        *,
        seed: int | None,
        changes: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        self.supplies = tuple(supplies)
        self._sizes = np.array([supply.num_samples for supply in supplies])
        self.starts = np.cumsum([0, *self._sizes])
        self._seeds = None if seed is None else [seed_of(supply.key, seed) for supply in supplies]
        self._changes = changes
        self.start_at(Origin(0, {}))

    def start_at(self, origin: Origin) -> None:
        """Begin the pattern at ``origin``; nothing before it is asked for any more."""
        self.origin = origin
        self._segments, self.end = self._plan()
        self._segment_starts = np.array([segment.start for segment in self._segments], np.int64)

    def starting_at(self, origin: Origin) -> SampleOrder:
        """The same order with another origin."""
        other = copy(self)
        other.start_at(origin)
        return other

    def samples_at(self, positions: Indices) -> Indices:
        """Sample at each of ``positions``, NO_SAMPLE from the end on."""
        source, count = self.locate(positions)
        samples = np.full(positions.shape, NO_SAMPLE, np.int64)
        for index, (size, first) in enumerate(zip(self._sizes.tolist(), self.starts.tolist(), strict=False)):
            mine = np.flatnonzero(source == index)
            epochs, within = np.divmod(count[mine], size)
            if self._seeds is not None and size != UNKNOWN_SIZE:
                for epoch in np.unique(epochs):
                    chosen = epochs == epoch
                    within[chosen] = shuffled(within[chosen], size, self._seeds[index], int(epoch))
            samples[mine] = first + within
        return samples

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Number of the source at each position (-1 from the end on), and how many of its samples lie before."""
        source, count = np.full(positions.shape, -1, np.int64), np.zeros(positions.shape, np.int64)
        number = np.searchsorted(self._segment_starts, positions, side="right") - 1
        if self.end is not None:
            number[positions >= self.end] = -1
        for index in np.unique(number[number >= 0]):
            segment = self._segments[index]
            mine = number == index
            patterns, place = np.divmod(positions[mine] - segment.start, PATTERN)
            source[mine] = of = segment.source[place]
            count[mine] = segment.counts[of] + patterns * segment.per_pattern[of] + segment.rank[place]
        return source, count

    def counts_at(self, position: int) -> dict[str, int]:
        """Samples of each source (by key) before ``position``, epochs counted through."""
        position = position if self.end is None else min(position, self.end)
        counts = self._counts(self._segment_at(position), position) if self._segments else self._origin_counts()
        return {supply.key: int(count) for supply, count in zip(self.supplies, counts, strict=True)}

    def segments(self) -> list[tuple[int, dict[str, float]]]:
        """(position, share of the samples by key) of each segment."""
        return [
            (segment.start, {
                supply.key: count / PATTERN
                for supply, count in zip(self.supplies, segment.per_pattern.tolist(), strict=True) if count
            })
            for segment in self._segments
        ]  # fmt: skip

    def _origin_counts(self) -> Indices:
        return np.array([self.origin.counts.get(supply.key, 0) for supply in self.supplies], np.int64)

    def _plan(self) -> tuple[list[_Segment], int | None]:
        position, counts = self.origin.position, self._origin_counts()
        limits = [supply.max_epochs * supply.num_samples or None for supply in self.supplies]
        weights = {supply.key: supply.weight for supply in self.supplies}
        later = []
        for at, changed in self._changes:
            if at <= position:
                weights |= changed
            else:
                later.append((at, changed))
        segments: list[_Segment] = []
        while True:
            active = [
                0.0 if limit is not None and count >= limit else weights[supply.key] / supply.labels_per_sample
                for supply, count, limit in zip(self.supplies, counts.tolist(), limits, strict=True)
            ]
            if not any(active):
                return segments, position
            segment = _segment(position, counts, active, self.supplies)
            segments.append(segment)
            stops = [
                _behind(segment, index, limit - int(counts[index]))
                for index, limit in enumerate(limits) if limit is not None and active[index]
            ]  # fmt: skip
            stops += [at for at, _ in later[:1]]
            if not stops:
                return segments, None
            position = min(stops)
            counts = self._counts(segment, position)
            if later and later[0][0] == position:
                weights |= later.pop(0)[1]

    def _segment_at(self, position: int) -> _Segment:
        return self._segments[int(np.searchsorted(self._segment_starts, position, side="right")) - 1]

    @staticmethod
    def _counts(segment: _Segment, position: int) -> Indices:
        patterns, rest = divmod(position - segment.start, PATTERN)
        counts: Indices = segment.counts + patterns * segment.per_pattern
        return counts + np.bincount(segment.source[:rest], minlength=len(counts))


def seed_of(key: str, seed: int) -> int:
    """The key of a source's order: ``seed`` itself where the source has no name."""
    return xxhash.xxh3_64_intdigest(key.encode(), seed % 2**64) if key else seed


def _segment(start: int, counts: Indices, shares: Sequence[float], supplies: Sequence[Supply]) -> _Segment:
    per_pattern = _apportion(shares, supplies)
    source = _schedule(per_pattern)
    order = np.argsort(source, kind="stable")  # the positions of source 0, then those of source 1, ...
    rank = np.empty_like(source)
    rank[order] = np.concatenate([np.arange(count) for count in per_pattern.tolist()])
    return _Segment(start, counts, source, rank, per_pattern)


def _schedule(counts: Indices) -> Indices:
    """Source of each position (n,), where source i occurs ``counts[i]`` times and n is the sum of all counts.

    After p positions a source has occurred p * counts[i] / n times, to within 1 - 1 / (2k - 2), where k >= 2 sources have a
    count. This is the schedule of Tijdeman ("The chairman assignment problem", Discrete Mathematics 32, 1980): the j-th
    sample (from 1) of source i may be placed at position p (from 1) or later if p * counts[i] / n - (j - 1) >= 1 / (2k - 2);
    of all samples that may, the one with the smallest (j - 1 / (2k - 2)) / counts[i] is placed.
    """
    num_positions = int(counts.sum())
    sources = np.repeat(np.arange(len(counts)), counts)  # of the j-th samples, source by source
    scale = 2 * max(2, int(np.count_nonzero(counts))) - 2
    j: Indices = np.concatenate([np.arange(1, count + 1) for count in counts.tolist()])
    releases = -(-((j - 1) * scale + 1) * num_positions // (scale * counts[sources]))  # rounded up
    # Equal fractions give equal floats, and different ones differ by far more than a float's precision.
    by_deadline = np.argsort((j * scale - 1) / counts[sources], kind="stable")
    urgency = np.empty_like(by_deadline)
    urgency[by_deadline] = np.arange(num_positions)

    by_release = np.argsort(releases, kind="stable")
    num_released = np.searchsorted(releases[by_release], np.arange(1, num_positions + 1), side="right")
    arrivals = urgency[by_release].tolist()
    candidates: list[int] = []
    placed = []
    first = 0
    for last in num_released.tolist():
        for arrival in arrivals[first:last]:
            heappush(candidates, arrival)
        first = last
        placed.append(heappop(candidates))
    schedule: Indices = sources[by_deadline[placed]]
    return schedule


def _apportion(shares: Sequence[float], supplies: Sequence[Supply]) -> Indices:
    """PATTERN positions dealt out by ``shares`` (largest remainder)."""
    wanted = np.array(shares) / sum(shares) * PATTERN
    counts: Indices = np.floor(wanted).astype(np.int64)
    counts[np.argsort(counts - wanted, kind="stable")[: PATTERN - counts.sum()]] += 1
    for supply, share, count in zip(supplies, shares, counts.tolist(), strict=True):
        if share and not count:
            raise DataError(
                f"the weight of source {supply.key!r}, {supply.weight:g}, gives it less than one sample in {PATTERN:,}: "
                "it would not be read; expected a larger weight, or 0"
            )
    return counts


def _behind(segment: _Segment, source: int, count: int) -> int:
    """The position behind the ``count``-th sample (from 1) of a source in a segment."""
    patterns, rest = divmod(count - 1, int(segment.per_pattern[source]))
    place = np.flatnonzero(segment.source == source)[rest]
    return segment.start + patterns * PATTERN + int(place) + 1
