"""Map positions of the training stream to sources and their samples.

The mapping is a closed formula: it can start at any position without reading the positions before
it.

*Mixture.* The stream is a sequence of *segments* with constant mixture weights. A segment repeats
one pattern of ``PATTERN`` positions, in which the weights are rounded to multiples of 1/PATTERN. At
every position of a segment, the number of samples read from a source differs from its rounded weight
by less than one sample (`_schedule`). A segment ends where the configured weights change, or after
the last sample of a source that was read ``max_epochs`` times. The other sources then divide its
weight. The stream ends when no source with a weight remains.

*Order.* Each source has its own sample order in each epoch (`shuffled`). The order's seed depends on
the source's name, so that it does not depend on the other sources.

- Adjacent samples on disk form blocks of ``BLOCK_SAMPLES``. The blocks are permuted over the epoch.
- Then the samples of each window of ``WINDOW_BLOCKS`` consecutive permuted blocks are permuted. A
  reader therefore touches only one window of the file, which fits into the page cache. A dataset of
  less than one window is permuted as a whole.
- The blocks start at a different sample in every epoch. The block boundaries, and the incomplete
  block at the end, therefore differ between epochs.

All arithmetic of the order uses unsigned 64-bit integers: it is the same on every platform and with
every version of numpy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples.packing import NO_SAMPLE
from torchtitan_like.util.splitmix import Integers, mix64

# Increase it with any change of the source at a position. It is saved with the data position.
MIXTURE_VERSION = 2
PATTERN = 2**16
# Size of a streamed source. Its samples are numbered in the order of reading.
UNKNOWN_SIZE = 2**48

Indices = NDArray[np.int64]

# Increase it with any change of the mapping. It is saved with the data position.
PERMUTATION_VERSION = 1
BLOCK_SAMPLES = 64
WINDOW_BLOCKS = 256

_WINDOW_SAMPLES = BLOCK_SAMPLES * WINDOW_BLOCKS
_HALF_ROUNDS = 8
_ROTATION, _BLOCKS, _WINDOWS = (np.uint64(stage) for stage in (1, 2, 3))


@dataclass(frozen=True)
class Supply:
    """The properties of a source that determine its part of the stream.

    key: name; "" for the only source of a run without a table.
    num_samples: samples per epoch; UNKNOWN_SIZE for a streamed source.
    labels_per_sample: mean number of labels in a sample.
    weight: fraction of the tokens, relative to the other weights.
    max_epochs: 0 is no limit.
    """

    key: str
    num_samples: int
    labels_per_sample: float
    weight: float = 1.0
    max_epochs: int = 0


@dataclass(frozen=True)
class Origin:
    """The start of the pattern: a position, and the samples of each source (by key) before it."""

    position: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class _Segment:
    """Positions from ``start`` on, with constant weights.

    counts: (num_sources,), samples of each source before ``start``.
    source: (PATTERN,), source at each position of the pattern.
    rank: (PATTERN,), number of earlier positions of the pattern with the same source.
    per_pattern: (num_sources,), samples of each source in the pattern.
    """

    start: int
    counts: Indices
    source: Indices
    rank: Indices
    per_pattern: Indices


class SampleOrder:
    """Maps each position to a sample number of the `JoinedSamples` of the same sources.

    changes: (position, new weights by key), in order of position.
    seed: None: samples in file order.
    end: the position after the last sample; None if the stream does not end.

    Raises DataError for a weight that is too small for a sample in each pattern.
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
        self.origin = Origin(0, {})
        segments, end = self._plan()
        self._segments = segments
        self.end = end

    def start_at(self, origin: Origin) -> None:
        """Start the pattern at ``origin``. Positions before it become invalid."""
        self.origin = origin
        segments, end = self._plan()
        self._segments = segments
        self.end = end

    def with_origin(self, origin: Origin) -> SampleOrder:
        """Return a copy with another origin."""
        other = copy(self)
        other.start_at(origin)
        return other

    def samples_at(self, positions: Indices) -> Indices:
        """Return the sample at each of ``positions``; NO_SAMPLE from the end on."""
        source, count = self.locate(positions)
        samples = np.full(positions.shape, NO_SAMPLE, np.int64)
        for index, size in enumerate(self._sizes.tolist()):
            rows = np.flatnonzero(source == index)
            epochs, source_samples = np.divmod(count[rows], size)
            if self._seeds is not None and size != UNKNOWN_SIZE:
                for epoch in np.unique(epochs):
                    in_epoch = epochs == epoch
                    source_samples[in_epoch] = shuffled(
                        source_samples[in_epoch], size, self._seeds[index], int(epoch)
                    )
            samples[rows] = self.starts[index] + source_samples
        return samples

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position, and the number of that source's samples before it.

        The source is -1 from the end on.
        """
        source = np.full(positions.shape, -1, np.int64)
        count = np.zeros(positions.shape, np.int64)
        starts = np.array([segment.start for segment in self._segments], np.int64)
        number = np.searchsorted(starts, positions, side="right") - 1
        if self.end is not None:
            number[positions >= self.end] = -1
        for index in np.unique(number[number >= 0]):
            segment = self._segments[index]
            rows = number == index
            num_patterns, offset = np.divmod(positions[rows] - segment.start, PATTERN)
            sources = segment.source[offset]
            source[rows] = sources
            count[rows] = (
                segment.counts[sources]
                + num_patterns * segment.per_pattern[sources]
                + segment.rank[offset]
            )
        return source, count

    def counts_at(self, position: int) -> dict[str, int]:
        """Return the samples of each source (by key) before ``position``, over all epochs."""
        position = position if self.end is None else min(position, self.end)
        counts = self._origin_counts()
        if self._segments:
            counts = self._counts(self._segment_at(position), position)
        return {supply.key: int(count) for supply, count in zip(self.supplies, counts, strict=True)}

    def segments(self) -> list[tuple[int, dict[str, float]]]:
        """Return the first position and the fractions of the samples (by key) of each segment."""
        segments = []
        for segment in self._segments:
            counts = zip(self.supplies, segment.per_pattern.tolist(), strict=True)
            fractions = {supply.key: count / PATTERN for supply, count in counts if count}
            segments.append((segment.start, fractions))
        return segments

    def _origin_counts(self) -> Indices:
        counts = [self.origin.counts.get(supply.key, 0) for supply in self.supplies]
        return np.array(counts, np.int64)

    def _plan(self) -> tuple[list[_Segment], int | None]:
        position, counts = self.origin.position, self._origin_counts()
        limits = [supply.max_epochs * supply.num_samples or None for supply in self.supplies]
        weights = {supply.key: supply.weight for supply in self.supplies}
        later = []
        for change_position, new_weights in self._changes:
            if change_position <= position:
                weights |= new_weights
            else:
                later.append((change_position, new_weights))
        segments: list[_Segment] = []
        while True:
            fractions = []
            for supply, count, limit in zip(self.supplies, counts.tolist(), limits, strict=True):
                is_used_up = limit is not None and count >= limit
                fraction = 0.0 if is_used_up else weights[supply.key] / supply.labels_per_sample
                fractions.append(fraction)
            if not any(fractions):
                return segments, position
            segment = _segment(position, counts, fractions, self.supplies)
            segments.append(segment)
            stops = [
                _end_of(segment, index, limit - int(counts[index]))
                for index, limit in enumerate(limits)
                if limit is not None and fractions[index]
            ]
            stops += [change_position for change_position, _ in later[:1]]
            if not stops:
                return segments, None
            position = min(stops)
            counts = self._counts(segment, position)
            if later and later[0][0] == position:
                weights |= later.pop(0)[1]

    def _segment_at(self, position: int) -> _Segment:
        index = bisect_right(self._segments, position, key=lambda segment: segment.start) - 1
        return self._segments[index]

    @staticmethod
    def _counts(segment: _Segment, position: int) -> Indices:
        num_patterns, remainder = divmod(position - segment.start, PATTERN)
        counts: Indices = segment.counts + num_patterns * segment.per_pattern
        return counts + np.bincount(segment.source[:remainder], minlength=len(counts))


def seed_of(key: str, seed: int) -> int:
    """Return the seed of a source's order: ``seed`` itself if the source has no name."""
    return xxhash.xxh3_64_intdigest(key.encode(), seed % 2**64) if key else seed


def _segment(
    start: int, counts: Indices, fractions: Sequence[float], supplies: Sequence[Supply]
) -> _Segment:
    per_pattern = _apportion(fractions, supplies)
    source = _schedule(per_pattern)
    order = np.argsort(source, kind="stable")  # positions of source 0, positions of source 1, ...
    rank = np.empty_like(source)
    rank[order] = np.concatenate([np.arange(count) for count in per_pattern.tolist()])
    return _Segment(start, counts, source, rank, per_pattern)


def _schedule(counts: Indices) -> Indices:
    """Return the source of each position (n,). Source i occurs ``counts[i]`` times; n is their sum.

    After p positions, source i has occurred p * counts[i] / n times, with an error of at most
    1 - 1 / (2k - 2), for k >= 2 sources with a count. The schedule comes from Tijdeman ("The
    chairman assignment problem", Discrete Mathematics 32, 1980):

    - The j-th sample (from 1) of source i is released at the first position p (from 1) with
      p * counts[i] / n - (j - 1) >= 1 / (2k - 2).
    - Among the released samples, the one with the smallest (j - 1 / (2k - 2)) / counts[i] is next.
    """
    num_positions = int(counts.sum())
    sources = np.repeat(np.arange(len(counts)), counts)  # source of each sample, source by source
    scale = 2 * max(2, int(np.count_nonzero(counts))) - 2
    j: Indices = np.concatenate([np.arange(1, count + 1) for count in counts.tolist()])
    releases = -(-((j - 1) * scale + 1) * num_positions // (scale * counts[sources]))  # rounded up
    # Equal fractions give equal floats. Different ones differ by more than a float's precision.
    by_deadline = np.argsort((j * scale - 1) / counts[sources], kind="stable")
    urgency = np.empty_like(by_deadline)
    urgency[by_deadline] = np.arange(num_positions)

    by_release = np.argsort(releases, kind="stable")
    positions = np.arange(1, num_positions + 1)
    num_released = np.searchsorted(releases[by_release], positions, side="right")
    released_urgencies = urgency[by_release].tolist()
    candidates: list[int] = []
    placed = []
    first = 0
    for end in num_released.tolist():
        for released in released_urgencies[first:end]:
            heappush(candidates, released)
        first = end
        placed.append(heappop(candidates))
    schedule: Indices = sources[by_deadline[placed]]
    return schedule


def _apportion(fractions: Sequence[float], supplies: Sequence[Supply]) -> Indices:
    """Divide PATTERN positions by ``fractions`` (largest remainder method)."""
    exact = np.array(fractions) / sum(fractions) * PATTERN
    counts: Indices = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PATTERN - counts.sum()]] += 1
    for supply, fraction, count in zip(supplies, fractions, counts.tolist(), strict=True):
        if fraction and not count:
            raise DataError(
                f"the weight {supply.weight:g} of source {supply.key!r} gives less than one sample "
                f"in {PATTERN:,}. Expected a larger weight, or 0: change it"
            )
    return counts


def _end_of(segment: _Segment, source: int, count: int) -> int:
    """Return the position after the ``count``-th sample (from 1) of a source in a segment."""
    num_patterns, remainder = divmod(count - 1, int(segment.per_pattern[source]))
    offset = np.flatnonzero(segment.source == source)[remainder]
    return segment.start + num_patterns * PATTERN + int(offset) + 1


# ---- the order of a source


def shuffled(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the samples at ``positions`` of epoch ``epoch``: a bijection of [0, num_samples).

    positions: any shape, each in [0, num_samples).
    """
    flat = positions.astype(np.uint64).ravel()
    epoch_key = mix64(mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch))
    window = flat // np.uint64(_WINDOW_SAMPLES)
    offset = _permute_windows(flat % np.uint64(_WINDOW_SAMPLES), window, num_samples, epoch_key)

    block = window * np.uint64(WINDOW_BLOCKS) + offset // np.uint64(BLOCK_SAMPLES)
    num_blocks = num_samples // BLOCK_SAMPLES
    is_complete = block < np.uint64(num_blocks)
    block[is_complete] = _permute(block[is_complete], num_blocks, mix64(epoch_key ^ _BLOCKS))
    unrotated = block * np.uint64(BLOCK_SAMPLES) + offset % np.uint64(BLOCK_SAMPLES)

    rotation = mix64(epoch_key ^ _ROTATION) % np.uint64(num_samples)
    samples: NDArray[np.int64] = ((unrotated + rotation) % np.uint64(num_samples)).astype(np.int64)
    return samples.reshape(positions.shape)


def _permute_windows(
    offsets: Integers, window: Integers, num_samples: int, epoch_key: Integers
) -> Integers:
    """Permute the offsets in each window. The last window may be shorter than the others."""
    keys = mix64(mix64(epoch_key ^ _WINDOWS) ^ window)
    num_full_windows, last_size = divmod(num_samples, _WINDOW_SAMPLES)
    is_last = window == np.uint64(num_full_windows)
    permuted = np.empty_like(offsets)
    permuted[~is_last] = _permute(offsets[~is_last], _WINDOW_SAMPLES, keys[~is_last])
    permuted[is_last] = _permute(offsets[is_last], last_size, keys[is_last])
    return permuted


def _permute(values: Integers, size: int, keys: Integers) -> Integers:
    """Apply a keyed bijection of [0, size) by cycle walking.

    A Feistel network on the next power of two is applied until the result is below ``size`` (Black,
    Rogaway 2002: "Ciphers with arbitrary finite domains", §3.2). keys: one key, or one per value.
    """
    if not len(values):
        return values
    bits = (size - 1).bit_length()
    keys = np.broadcast_to(keys, values.shape)
    result = _feistel(values, bits, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while len(outside):
        result[outside] = _feistel(result[outside], bits, keys[outside])
        outside = outside[result[outside] >= np.uint64(size)]
    return result


def _feistel(values: Integers, bits: int, keys: Integers) -> Integers:
    """Apply a keyed bijection of [0, 2**bits): XOR each half of the bits with a hash of the other.

    The halves have different widths if ``bits`` is odd.
    """
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64(2**width - 1) for width in (bits // 2, bits - bits // 2))
    low = values & low_mask
    high = values >> low_bits
    for half_round in range(0, _HALF_ROUNDS, 2):
        high = high ^ (mix64((keys + np.uint64(half_round)) ^ (low << np.uint64(32))) & high_mask)
        low = low ^ (mix64((keys + np.uint64(half_round + 1)) ^ (high << np.uint64(32))) & low_mask)
    joined: Integers = (high << low_bits) | low
    return joined
