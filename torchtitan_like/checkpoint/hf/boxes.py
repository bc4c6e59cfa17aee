"""List the rectangles of a tensor that a rank holds, and intersect rectangles.

A *box* is a rectangle: a (start, count, step) for each dimension. A *range* is a half-open interval
(first, end) of indices along one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from torch import Tensor

from torchtitan_like.models.hf_table import Box, Link, Shape, Span, slices
from torchtitan_like.util.shards import local_positions, local_shard

Range = tuple[int, int]


def local_boxes(tensor: Any) -> list[tuple[Box, Tensor]]:
    """Return the boxes of the full tensor that this rank holds, each with a view of its memory.

    A plain tensor is one box. Uneven and strided shards of a DTensor are exact. All steps are 1.
    """
    local = local_shard(tensor)
    spans = [_runs(positions) for positions in local_positions(tensor)]
    offsets = [[sum(n for _, n, _ in runs[:i]) for i in range(len(runs))] for runs in spans]
    boxes = []
    for indices in product(*(range(len(runs)) for runs in spans)):
        box = tuple(runs[i] for runs, i in zip(spans, indices, strict=True))
        local_box = tuple(
            (starts[i], n, 1) for starts, i, (_, n, _) in zip(offsets, indices, box, strict=True)
        )
        boxes.append((box, local[slices(local_box)]))
    return boxes


def _runs(positions: Tensor) -> list[Span]:
    """Group positions into runs of neighbors; no run if there are no positions."""
    if not len(positions):
        return []
    starts = [0, *(1 + (positions.diff() != 1).nonzero().flatten()).tolist()]
    ends = [*starts[1:], len(positions)]
    return [(int(positions[i]), end - i, 1) for i, end in zip(starts, ends, strict=True)]


def intersect(box: Box, bounds: Sequence[Range]) -> list[Range] | None:
    """Return the ranges of a box's elements that lie within `bounds`; None if there are none."""
    ranges = []
    for (start, count, step), (low, high) in zip(box, bounds, strict=True):
        first = max(0, -((start - low) // step))
        end = min(count, -((start - high) // step))
        if first >= end:
            return None
        ranges.append((first, end))
    return ranges


def crop(box: Box, ranges: Sequence[Range]) -> Box:
    """Return the part of a box that `ranges` selects."""
    return tuple(
        (start + first * step, end - first, step)
        for (start, _, step), (first, end) in zip(box, ranges, strict=True)
    )


def overlap(link: Link, box: Box) -> tuple[Box, Box] | None:
    """Return the overlap of a link and a shard's box as two boxes; None if there is no overlap.

    The first box is relative to the shard, the second one to the external tensor.
    """
    ranges = intersect(link.native_box, [(start, start + count) for start, count, _ in box])
    if ranges is None:
        return None
    native = crop(link.native_box, ranges)
    local = tuple(
        (start - low, count, 1) for (start, count, _), (low, _, _) in zip(native, box, strict=True)
    )
    external_ranges = ranges[len(ranges) - len(link.external_box) :]
    if link.transposed:
        external_ranges[-2:] = external_ranges[-1], external_ranges[-2]
    return local, crop(link.external_box, external_ranges)


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a tensor in C order, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@lru_cache(maxsize=1024)
def rectangles(shape: Shape, low: int, high: int) -> tuple[tuple[Range, ...], ...]:
    """Split the elements from `low` to `high` (C order) into rectangles: a range per dimension."""
    if low >= high:
        return ()
    if not shape:
        return ((),)
    inner, full = math.prod(shape[1:]), tuple((0, n) for n in shape[1:])
    first, head = divmod(low, inner)
    last, tail = divmod(high, inner)
    if first == last:
        return tuple(((first, first + 1), *rest) for rest in rectangles(shape[1:], head, tail))
    parts = []
    if head:
        parts += [((first, first + 1), *rest) for rest in rectangles(shape[1:], head, inner)]
        first += 1
    if first < last:
        parts.append(((first, last), *full))
    return (*parts, *(((last, last + 1), *rest) for rest in rectangles(shape[1:], 0, tail)))
