"""Choose the rows of a long curve that are drawn, so that no spike is lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def decimate(values: NDArray[np.float64], max_points: int) -> Indices:
    """Return the sorted indices of at most `max_points` finite values that show the same curve.

    values: float64 (rows,). The rows are divided into buckets of equal size. The smallest and the
    largest value of each bucket are kept, and the first and last finite value of the curve.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= max_points:
        return finite
    num_buckets = max(1, (max_points - 2) // 2)
    starts = np.arange(num_buckets + 1) * len(finite) // num_buckets
    kept = {int(finite[0]), int(finite[-1])}
    for start, end in zip(starts, starts[1:], strict=False):
        bucket = finite[start:end]
        heights = values[bucket]
        kept |= {int(bucket[heights.argmin()]), int(bucket[heights.argmax()])}
    return np.array(sorted(kept), dtype=np.int64)


def trailing_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return for each value the mean of the last `window` finite values up to it; NaN without any.

    values: float64 (rows,).
    """
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    sums = np.concatenate([[0.0], np.cumsum(finite)])
    ends = np.arange(1, len(finite) + 1)
    starts = np.maximum(0, ends - window)
    means = np.full(len(values), np.nan)
    means[is_finite] = (sums[ends] - sums[starts]) / (ends - starts)
    return means
