"""The one plan of an export: which bytes of which file are which rectangle of whose tensor. Equal on every rank.

A *holder* is whoever has the numbers: a rank that has a shard, or the number of a file of shards. Files are divided
into extents of 4 MiB; a *move* is one rectangle on its way from a holder into an extent.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import EXTENT
from torchtitan_like.checkpoint.hf.pieces import common, meet, narrow, owned
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, Entry, FileLayout, dtype_code, file_names, lay_out
from torchtitan_like.models.hf_table import Box, Link, Rows, Shape, Table, links, slices, their_shapes

ExtentId = tuple[int, int]  # (number of the file, number of the extent in it)
Key = tuple[str, Box]  # a tensor's name, and the rectangle of it that a holder has


class Held(NamedTuple):
    """What one holder has of one tensor; a box is a rectangle of the full tensor, with steps of 1."""

    name: str
    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]


class Part(NamedTuple):
    """One rectangle of a tensor that is written. `local` lies within the held rectangle `key`."""

    box: Box
    holders: tuple[int, ...]
    key: Key
    local: Box
    transposed: bool  # the last two dimensions are swapped between `box` and `local`


@dataclass(frozen=True)
class Target:
    """A tensor that is written, with all its parts."""

    dtype: str
    shape: Shape
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Move(NamedTuple):
    """One rectangle of an extent: `box` of the held rectangle `key` goes to `offset` (bytes), in steps of `strides`."""

    extent: ExtentId
    holder: int
    key: Key
    box: Box
    transposed: bool
    dtype: str
    shape: Shape
    offset: int
    strides: tuple[int, ...]  # elements

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, held: Tensor) -> Tensor:
        """The rectangle as a view of what the holder has."""
        view = held[slices(self.box)]
        return (view.mT if self.transposed else view).reshape(self.shape)

    def put(self, extent: Tensor, values: Tensor) -> None:
        """Copy `values` into the extent, uint8 (bytes,), converted to its dtype."""
        dtype = DTYPES[self.dtype]
        length = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        elements = extent[self.offset : self.offset + length * dtype.itemsize].view(dtype)
        elements.as_strided(self.shape, self.strides).copy_(values)


def hold(tensors: Mapping[str, Tensor]) -> tuple[list[Held], dict[Key, Tensor]]:
    """What this rank has, to be told to the others, and where it is. Raises CheckpointError for what cannot be stored."""
    told: list[Held] = []
    views: dict[Key, Tensor] = {}
    for name, tensor in tensors.items():
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            raise CheckpointError(f"{name} is a DTensor of partial sums: reduce it before it is exported")
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        here = owned(tensor) if local.numel() else []  # a rank may be left without rows, or without a place in the mesh
        told.append(Held(name, dtype_code(tensor.dtype), tuple(tensor.shape), tuple(box for box, _ in here)))
        views |= {(name, box): view for box, view in here}
    return told, views


def merge(told: Sequence[Sequence[Held]], names: Sequence[str]) -> dict[str, tuple[Held, dict[Box, tuple[int, ...]]]]:
    """What all holders (called `names` in errors) have, by name: for each rectangle its holders.

    Raises CheckpointError unless they agree and the rectangles cover each tensor exactly once.
    """
    found: dict[str, tuple[Held, dict[Box, list[int]]]] = {}
    for holder, part in enumerate(told):
        for held in part:
            first, boxes = found.setdefault(held.name, (held, {}))
            if (first.dtype, first.shape) != (held.dtype, held.shape):
                raise CheckpointError(
                    f"{held.name} is {held.dtype} {list(held.shape)} in {names[holder]}, but {first.dtype} "
                    f"{list(first.shape)} in another one: they do not belong to one model"
                )
            for box in held.boxes:
                boxes.setdefault(box, []).append(holder)
    for name, (held, boxes) in found.items():
        check_cover(name, held.shape, boxes)
    return {name: (held, {b: tuple(h) for b, h in boxes.items()}) for name, (held, boxes) in found.items()}


def check_cover(name: str, shape: Shape, boxes: Iterable[Box]) -> None:
    """Raises CheckpointError unless `boxes` (steps of 1) hold every element of `shape` exactly once."""
    if 0 in shape:
        return
    boxes = list(boxes)
    ends = [sorted({0, n} | {e for b in boxes for e in (b[d][0], b[d][0] + b[d][1])}) for d, n in enumerate(shape)]
    place = [{end: i for i, end in enumerate(dim)} for dim in ends]
    times = np.zeros([len(dim) - 1 for dim in ends], dtype=np.int32)  # how often each cell between the ends is held
    for box in boxes:
        times[tuple(slice(at[start], at[start + n]) for at, (start, n, _) in zip(place, box, strict=True))] += 1
    wrong = np.argwhere(times != 1)
    if len(wrong):
        cell = [(dim[i], dim[i + 1]) for dim, i in zip(ends, wrong[0], strict=True)]
        what = "is missing" if times[tuple(wrong[0])] == 0 else "is there more than once"
        where = ", ".join(f"{low}:{high}" for low, high in cell)
        raise CheckpointError(f"{name}[{where}] {what}: the shards do not cover {name} {list(shape)} exactly once")


def targets(
    held: Mapping[str, tuple[Held, Mapping[Box, tuple[int, ...]]]], rows: Rows, tied: Table, dtype: torch.dtype | None
) -> dict[str, Target]:
    """Their tensors, in the order in which they are written: by name, its numbers as numbers.

    Floating-point tensors are converted to `dtype`, None leaves them. Raises CheckpointError for tensors no row knows.
    """
    try:
        found = links(rows, {name: first.shape for name, (first, _) in held.items()}, tied)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the tensors do not fit the model's table of names: {error.args[0]}") from error
    shapes = their_shapes(found)
    made: dict[str, Target] = {}
    for link in found:
        first, boxes = held[link.ours]
        code = first.dtype if dtype is None or not DTYPES[first.dtype].is_floating_point else dtype_code(dtype)
        target = made.setdefault(link.theirs, Target(code, shapes[link.theirs], []))
        if target.dtype != code:
            raise CheckpointError(f"{link.theirs} is made of tensors of two dtypes, {target.dtype} and {code}")
        for box, holders in boxes.items():
            if part := _part(link, box, holders):
                target.parts.append(part)
    return {name: made[name] for name in sorted(made, key=natural)}


def natural(name: str) -> list[tuple[bool, int, str]]:
    """The sort key by which layer 2 comes before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _part(link: Link, box: Box, holders: tuple[int, ...]) -> Part | None:
    """What a link and a held rectangle have in common."""
    met = meet(link, box)
    return None if met is None else Part(met[1], holders, (link.ours, box), met[0], link.transposed)


def _swapped(dims: Sequence[tuple[int, int]], transposed: bool) -> Sequence[tuple[int, int]]:
    return (*dims[:-2], dims[-1], dims[-2]) if transposed else dims


def divide(found: Mapping[str, Target], shard_bytes: int) -> list[list[str]]:
    """The names of each file: as many in order as fit into `shard_bytes`, at least one."""
    groups: list[list[str]] = []
    room = 0
    for name, target in found.items():
        if not groups or target.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= target.nbytes
    return groups


def group_by(names: Iterable[str], numbers: Mapping[str, Hashable]) -> list[list[str]]:
    """The names of each file, in the order of the files' numbers. Every name has one."""
    groups = defaultdict(list)
    for name in names:
        groups[numbers[name]].append(name)
    return [groups[number] for number in sorted(groups)]  # type: ignore[type-var] # all of one kind


def lay_out_all(found: Mapping[str, Target], groups: Sequence[Sequence[str]]) -> list[FileLayout]:
    """The files of these groups of names."""
    return [
        lay_out(file, [(name, found[name].dtype, found[name].shape) for name in names])
        for file, names in zip(file_names(len(groups)), groups, strict=True)
    ]


def extents_of(files: Sequence[FileLayout]) -> list[ExtentId]:
    """Every extent of the files, in order."""
    return [(f, k) for f, file in enumerate(files) for k in range(-(-file.size // EXTENT))]


def assign(files: Sequence[FileLayout], found: Mapping[str, Target]) -> dict[ExtentId, int]:
    """The rank that writes each extent: one that holds most of it, or nearly, so that all have about as much to write."""
    held: dict[ExtentId, Counter[tuple[int, ...]]] = {extent: Counter() for extent in extents_of(files)}
    for extent, entry, part, cuts in _overlaps(files, found, lambda extent, part: True):
        size = math.prod(last - first for first, last in cuts) * DTYPES[entry.dtype].itemsize
        held[extent][part.holders] += size
    shares: dict[tuple[int, ...], list[ExtentId]] = defaultdict(list)
    for extent, counts in held.items():
        most = max(counts.values(), default=0)
        near = [holders for holders, size in counts.items() if 10 * size >= 9 * most] or [(0,)]
        shares[min(near, key=lambda holders: (len(shares[holders]) / len(holders), holders))].append(extent)
    return {
        extent: holders[i * len(holders) // len(extents)]  # replicas: each a stretch of its own
        for holders, extents in shares.items()
        for i, extent in enumerate(extents)
    }


def moves(
    files: Sequence[FileLayout],
    found: Mapping[str, Target],
    holder_of: Callable[[ExtentId, Part], int | None],
) -> Iterator[Move]:
    """The moves into all extents, in one order. `holder_of`: who gives that part of an extent; None leaves it out."""
    for extent, entry, part, cuts in _overlaps(files, found, lambda extent, part: holder_of(extent, part) is not None):
        holder = holder_of(extent, part)
        assert holder is not None
        box, strides = narrow(part.box, cuts), contiguous(entry.shape)
        first = sum(span[0] * stride for span, stride in zip(box, strides, strict=True))
        ours = [(0, 1)] * (len(part.local) - len(box)) + list(_swapped(cuts, part.transposed))
        yield Move(
            extent,
            holder,
            part.key,
            narrow(part.local, ours),
            part.transposed,
            entry.dtype,
            tuple(count for _, count, _ in box),
            entry.begin + first * DTYPES[entry.dtype].itemsize - extent[1] * EXTENT,
            tuple(step * stride for (_, _, step), stride in zip(box, strides, strict=True)),
        )


def _overlaps(
    files: Sequence[FileLayout], found: Mapping[str, Target], keep: Callable[[ExtentId, Part], bool]
) -> Iterator[tuple[ExtentId, Entry, Part, list[tuple[int, int]]]]:
    """Every rectangle that an extent and a part have in common, as positions of the part's spans."""
    for f, file in enumerate(files):
        for entry in file.entries:
            width, strides = DTYPES[entry.dtype].itemsize, contiguous(entry.shape)
            for part in found[entry.name].parts:
                first = sum(start * stride for (start, _, _), stride in zip(part.box, strides, strict=True))
                last = first + sum((n - 1) * step * s for (_, n, step), s in zip(part.box, strides, strict=True))
                for k in range((entry.begin + first * width) // EXTENT, (entry.begin + last * width) // EXTENT + 1):
                    if not keep((f, k), part):
                        continue
                    low = max(0, (k * EXTENT - entry.begin) // width)
                    high = min((entry.end - entry.begin) // width, ((k + 1) * EXTENT - entry.begin) // width)
                    for bounds in rectangles(entry.shape, low, high):
                        cuts = common(part.box, bounds)
                        if cuts is not None:
                            yield (f, k), entry, part, cuts


def contiguous(shape: Shape) -> tuple[int, ...]:
    """The strides of a tensor in C order, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@lru_cache(maxsize=1024)
def rectangles(shape: Shape, low: int, high: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Elements `low` to `high` of a tensor in C order as rectangles, each (first, last) for every dimension."""
    if low >= high:
        return ()
    if not shape:
        return ((),)
    inner, full = math.prod(shape[1:]), tuple((0, n) for n in shape[1:])
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        return tuple(((first, first + 1), *rest) for rest in rectangles(shape[1:], head, tail))
    found = []
    if head:
        found += [((first, first + 1), *rest) for rest in rectangles(shape[1:], head, inner)]
        first += 1
    if first < last:
        found.append(((first, last), *full))
    return (*found, *(((last, last + 1), *rest) for rest in rectangles(shape[1:], 0, tail)))
