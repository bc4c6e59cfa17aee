"""Rectangles as ranges, for `dcp_storage.py`."""

from __future__ import annotations

import math
from functools import lru_cache

from torchtitan_like.util.boxes import Shape, contiguous_strides

__all__ = ["contiguous_strides", "rectangles"]
Range = tuple[int, int]


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
