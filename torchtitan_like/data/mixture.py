"""Which sample of which source stands at a position of the training stream: closed formulas, so that any position is
reached at once.

The stream is a row of *segments*, in each of which the shares are constant. A segment repeats one pattern of
``PATTERN`` positions, in which every source has its share (to half a sample), spread evenly: the first positions of a
pattern hold the shares as well as all of them do. A segment ends where the configured weights change, or behind the
last sample of a source that has been read ``max_epochs`` times: the others then share what was its part. The stream
ends when no source with a weight is left.

Samples of a source are read in that source's own order (`order.shuffled`), epoch after epoch. It is keyed by the
source's name, so that another source beside it changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import DataError
from .order import shuffled
from .packing import NO_SAMPLE

# Changes whenever any position would get another source. Saved with the data position.
MIXTURE_VERSION = 1
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
    places = [(np.arange(count) + 0.5) / max(count, 1) for count in per_pattern.tolist()]
    # In order of place; where two are equal, in the order of the sources.
    order = np.argsort(np.concatenate(places), kind="stable")
    source = np.repeat(np.arange(len(shares)), per_pattern)[order]
    rank = np.concatenate([np.arange(count) for count in per_pattern.tolist()])[order]
    return _Segment(start, counts, source, rank, per_pattern)


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
