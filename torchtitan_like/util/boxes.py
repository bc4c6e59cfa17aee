"""Rectangles of tensors: where two of them overlap, and which ones a range of elements has.

A *box* has a (start, count, step) for each dimension of a tensor. Loads, exports, consolidations
and optimizers of whole matrices all describe with boxes which values they copy. This module does
not import torch. `util/shards.py` returns the boxes of a DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Span = tuple[int, int, int]  # (start, count, step) along one dimension
Box = tuple[Span, ...]  # a span for every dimension


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return tuple((0, count, 1) for count in shape)


def box_at(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the box of a block of `sizes` at `offsets`."""
    return tuple((start, count, 1) for start, count in zip(offsets, sizes, strict=True))


def sizes_of(box: Box) -> Shape:
    """Return the number of elements along each dimension."""
    return tuple(count for _, count, _ in box)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as the index of an array."""
    return tuple(slice(start, start + count * step, step) for start, count, step in box)


def intersect(box: Box, bounds: Box) -> Box | None:
    """Return the indices of a box's elements that lie in `bounds`; None if there are none.

    bounds: a box with steps of 1. The indices are a box of the box: index 0 is its first element.
    """
    part = []
    for (start, count, step), (low, length, _) in zip(box, bounds, strict=True):
        first = max(0, -((start - low) // step))
        end = min(count, -((start - low - length) // step))
        if first >= end:
            return None
        part.append((first, end - first, 1))
    return tuple(part)


def crop(box: Box, part: Box) -> Box:
    """Return the elements of a box with the indices `part`, which have steps of 1."""
    return tuple(
        (start + first * step, count, step)
        for (start, _, step), (first, count, _) in zip(box, part, strict=True)
    )


def relative(box: Box, bounds: Box) -> Box:
    """Return a box of a tensor as a box of the block `bounds` of it."""
    return tuple(
        (start - low, count, step)
        for (start, count, step), (low, _, _) in zip(box, bounds, strict=True)
    )


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a tensor in C order, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def element_range(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the range (first, end) of elements, in C order, that contains a box of a tensor."""
    spans = list(zip(box, contiguous_strides(shape), strict=True))
    first = sum(start * stride for (start, _, _), stride in spans)
    return first, first + 1 + sum((n - 1) * step * stride for (_, n, step), stride in spans)


@lru_cache(maxsize=1024)
def rectangles(shape: Shape, low: int, high: int) -> tuple[Box, ...]:
    """Split the elements from `low` to `high` (C order) of a tensor into boxes."""
    if low >= high:
        return ()
    if not shape:
        return ((),)
    inner, full = math.prod(shape[1:]), whole(shape[1:])
    first, head = divmod(low, inner)
    last, tail = divmod(high, inner)
    if first == last:
        return tuple(((first, 1, 1), *rest) for rest in rectangles(shape[1:], head, tail))
    parts: list[Box] = []
    if head:
        parts += [((first, 1, 1), *rest) for rest in rectangles(shape[1:], head, inner)]
        first += 1
    if first < last:
        parts.append(((first, last - first, 1), *full))
    return (*parts, *(((last, 1, 1), *rest) for rest in rectangles(shape[1:], 0, tail)))


class BoxPair(NamedTuple):
    """Boxes of two tensors with equal values.

    Their sizes are equal, except that `source` may have one more leading dimension, of size 1.
    transposed: the last two dimensions are swapped between the boxes.
    """

    source: Box
    target: Box
    transposed: bool = False

    def within_source(self, bounds: Box) -> BoxPair | None:
        """Crop both boxes to the block `bounds` of the source; None if nothing is left.

        The new source is relative to the block.
        """
        part = intersect(self.source, bounds)
        if part is None:
            return None
        target = self._swap(part[len(part) - len(self.target) :])
        return BoxPair(
            relative(crop(self.source, part), bounds), crop(self.target, target), self.transposed
        )

    def within_target(self, bounds: Box) -> BoxPair | None:
        """Crop both boxes to the block `bounds` of the target; None if nothing is left."""
        part = intersect(self.target, bounds)
        if part is None:
            return None
        leading = whole((1,) * (len(self.source) - len(part)))
        source = crop(self.source, (*leading, *self._swap(part)))
        return BoxPair(source, crop(self.target, part), self.transposed)

    def _swap(self, part: Box) -> Box:
        return (*part[:-2], part[-1], part[-2]) if self.transposed else part

    def view(self, tensor: Any) -> Any:
        """Return the source box of `tensor` as a view with the dimensions of the target box."""
        view = tensor[slices(self.source)]
        if len(self.source) > len(self.target):
            view = view[0]
        return view.mT if self.transposed else view
