"""Which rectangles of somebody's tensors belong where in the tensors of this rank, on every topology."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.models.hf_table import Box, Link, Shape, Span, slices

# Elements that are read, converted and copied at a time: what loading needs beside the model itself.
MOST = 2**22


@dataclass(frozen=True)
class Form:
    """What a whole tensor is."""

    shape: Shape
    dtype: torch.dtype


class Piece(NamedTuple):
    """A rectangle of one of their tensors, and the view of ours that it fills, of the same shape."""

    theirs: str
    box: Box
    target: Tensor


def owned(tensor: Any) -> list[tuple[Box, Tensor]]:
    """The rectangles of the full tensor that are here (steps of 1), each with the view of the memory that holds it.

    A plain tensor is here as a whole. Of a DTensor the placements are applied to the positions themselves, by the code
    that shards: uneven and strided shards come out as they are.
    """
    local = tensor.detach()
    spans = [[(0, n, 1)] for n in tensor.shape]
    if hasattr(tensor, "placements"):
        local = local.to_local()
        spans = _owned_spans(tensor)
    places = [[sum(n for _, n, _ in runs[:i]) for i in range(len(runs))] for runs in spans]
    found = []
    for chosen in product(*(range(len(runs)) for runs in spans)):
        box = tuple(runs[i] for runs, i in zip(spans, chosen, strict=True))
        here = tuple((offsets[i], n, 1) for offsets, i, (_, n, _) in zip(places, chosen, box, strict=True))
        found.append((box, local[slices(here)]))
    return found


def _owned_spans(tensor: Any) -> list[list[Span]]:
    """For each dimension, the runs of positions that are here, in the order of local memory."""
    sharded = {placement.dim for placement in tensor.placements if not placement.is_replicate()}
    spans: list[list[Span]] = [[(0, n, 1)] for n in tensor.shape]
    for dim in sharded:
        positions = torch.arange(tensor.shape[dim]).view([-1 if d == dim else 1 for d in range(tensor.ndim)])
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_replicate() or placement.dim != dim:
                continue
            shards, _ = placement._split_tensor(positions, tensor.device_mesh.size(mesh_dim), with_padding=False)
            positions = shards[tensor.device_mesh.get_local_rank(mesh_dim)]
        spans[dim] = _runs(positions.flatten().tolist())
    return spans


def _runs(positions: list[int]) -> list[Span]:
    starts = [i for i, p in enumerate(positions) if i == 0 or p != positions[i - 1] + 1]
    ends = [*starts[1:], len(positions)][: len(starts)]  # no run at all where nothing is here
    return [(positions[i], end - i, 1) for i, end in zip(starts, ends, strict=True)]


def common(box: Box, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """For each dimension, which elements (first, end) of the box lie within bounds (low, high); None where none does."""
    cuts = []
    for (start, count, step), (low, high) in zip(box, bounds, strict=True):
        first, end = max(0, -((start - low) // step)), min(count, -((start - high) // step))
        if first >= end:
            return None
        cuts.append((first, end))
    return cuts


def narrow(box: Box, cuts: Sequence[tuple[int, int]]) -> Box:
    """Elements (first, end) of the box, in each dimension."""
    return tuple((s + first * step, end - first, step) for (s, _, step), (first, end) in zip(box, cuts, strict=True))


def meet(link: Link, box: Box) -> tuple[Box, Box] | None:
    """What a link and an owned rectangle have in common: its place within that rectangle, and within their tensor."""
    cuts = common(link.our_box, [(start, start + count) for start, count, _ in box])
    if cuts is None:
        return None
    ours = narrow(link.our_box, cuts)
    local = tuple((start - low, count, 1) for (start, count, _), (low, _, _) in zip(ours, box, strict=True))
    theirs = cuts[len(cuts) - len(link.their_box) :]
    if link.transposed:
        theirs[-2:] = theirs[-1], theirs[-2]
    return local, narrow(link.their_box, theirs)


def pieces(found: Iterable[Link], tensors: Mapping[str, Any]) -> Iterator[Piece]:
    """What this rank reads to fill its part of `tensors` (our names), at most MOST elements at a time."""
    for name, group in groupby(found, key=lambda link: link.ours):
        here = owned(tensors[name])
        for link in group:
            for box, view in here:
                if met := meet(link, box):
                    local, theirs = met
                    target = view[slices(local)]
                    target = target if len(theirs) == len(local) else target[0]
                    yield from _divided(Piece(link.theirs, theirs, target.mT if link.transposed else target))


def _divided(piece: Piece) -> Iterator[Piece]:
    """The piece in parts of at most MOST elements, each as close together in their tensor as can be."""
    if piece.target.numel() <= MOST:
        yield piece
        return
    counts = piece.target.shape
    dim = next(d for d, count in enumerate(counts) if count > 1)
    half = counts[dim] // 2
    for cut in ((0, half), (half, counts[dim])):
        yield from _divided(_cut(piece, [cut if d == dim else (0, n) for d, n in enumerate(counts)]))


def _cut(piece: Piece, cuts: Sequence[tuple[int, int]]) -> Piece:
    target = piece.target[tuple(slice(*cut) for cut in cuts)]
    return Piece(piece.theirs, narrow(piece.box, cuts), target)


def within(piece: Piece, offsets: Sequence[int], sizes: Sequence[int]) -> Piece | None:
    """What the piece and a chunk of their tensor have in common, its box counted from the chunk's own first element."""
    cuts = common(piece.box, [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)])
    if cuts is None:
        return None
    part = _cut(piece, cuts)
    box = tuple((start - offset, n, step) for (start, n, step), offset in zip(part.box, offsets, strict=True))
    return part._replace(box=box)
