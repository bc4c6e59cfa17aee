"""Sets of time spans. A set is float64 (spans, 2): disjoint [start, end) in order, microseconds."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]


class SpanList:
    """Spans in any order, which may overlap. Takes 16 bytes for each."""

    def __init__(self) -> None:
        self._bounds = array("d")

    def add(self, start: float, end: float) -> None:
        """Add a span."""
        self._bounds.append(start)
        self._bounds.append(end)

    def raw(self) -> Spans:
        """Return the spans as they were added."""
        return np.array(self._bounds, dtype=np.float64).reshape(-1, 2)

    def merged(self) -> Spans:
        """Return the set that the spans cover."""
        return merge(self.raw())


def merge(spans: Spans) -> Spans:
    """Return the set that spans in any order cover."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    is_first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    merged = np.stack([spans[is_first, 0], ends[is_last]], axis=1)
    return merged[merged[:, 1] > merged[:, 0]]


def union(*sets: Spans) -> Spans:
    """Return what any of the sets covers."""
    return merge(np.concatenate([np.empty((0, 2)), *sets]))


def without(spans: Spans, covers: Spans) -> Spans:
    """Return what `spans` covers and `covers` does not."""
    points = np.unique(np.concatenate([spans.ravel(), covers.ravel()]))
    if len(points) < 2:
        return np.empty((0, 2))
    pieces = np.stack([points[:-1], points[1:]], axis=1)
    return merge(pieces[_covers(spans, points[:-1]) & ~_covers(covers, points[:-1])])


def clip(spans: Spans, start: float, end: float) -> Spans:
    """Return the part of a set between two times."""
    clipped = spans.clip(start, end)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def length(spans: Spans) -> float:
    """Return the total time of a set, microseconds."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def _covers(spans: Spans, points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each point whether a set covers it."""
    if not len(spans):
        return np.zeros(len(points), dtype=np.bool_)
    index = np.searchsorted(spans[:, 0], points, "right") - 1
    covered: NDArray[np.bool_] = (index >= 0) & (points < spans[index, 1])
    return covered
