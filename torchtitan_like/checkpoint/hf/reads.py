"""Plan a load: list the rectangles of stored tensors that fill this rank's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.checkpoint.hf.boxes import Range, crop, intersect, local_boxes, overlap
from torchtitan_like.models.hf_table import Box, Link, Shape, slices

# Number of elements read, converted, and copied at a time. It bounds the memory that loading needs
# in addition to the model.
MAX_ELEMENTS = 2**22


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a full tensor."""

    shape: Shape
    dtype: torch.dtype


class Read(NamedTuple):
    """Copy `box` of the stored tensor `name` into `target`, a view of this rank's parameter."""

    name: str
    box: Box
    target: Tensor


def plan_reads(links: Iterable[Link], tensors: Mapping[str, Any]) -> Iterator[Read]:
    """Yield the reads that fill this rank's `tensors` (native names), at most MAX_ELEMENTS each."""
    for name, group in groupby(links, key=lambda link: link.native):
        shards = local_boxes(tensors[name])
        for link in group:
            for shard_box, view in shards:
                if boxes := overlap(link, shard_box):
                    local, external = boxes
                    target = view[slices(local)]
                    if len(external) != len(local):
                        target = target[0]
                    target = target.mT if link.transposed else target
                    yield from _split(Read(link.external, external, target))


def _split(read: Read) -> Iterator[Read]:
    """Split a read along its first dimensions, so that the parts stay as contiguous as possible."""
    if read.target.numel() <= MAX_ELEMENTS:
        yield read
        return
    counts = read.target.shape
    dim = next(d for d, count in enumerate(counts) if count > 1)
    half = counts[dim] // 2
    for part in ((0, half), (half, counts[dim])):
        yield from _split(_crop(read, [part if d == dim else (0, n) for d, n in enumerate(counts)]))


def _crop(read: Read, ranges: Sequence[Range]) -> Read:
    target = read.target[tuple(slice(*bounds) for bounds in ranges)]
    return Read(read.name, crop(read.box, ranges), target)


def crop_to_chunk(read: Read, offsets: Sequence[int], sizes: Sequence[int]) -> Read | None:
    """Return the part of a read that a stored chunk contains; its box is relative to the chunk.

    offsets and sizes give the chunk's position in the full tensor. Returns None if the read and the
    chunk do not overlap.
    """
    bounds = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    ranges = intersect(read.box, bounds)
    if ranges is None:
        return None
    part = _crop(read, ranges)
    spans = zip(part.box, offsets, strict=True)
    box = tuple((start - offset, n, step) for (start, n, step), offset in spans)
    return part._replace(box=box)
