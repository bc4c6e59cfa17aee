"""A model's tensors beside another format's: pairs of rectangles that hold the same numbers, read in either direction.

Whoever copies needs no more than these pairs, so that loading, exporting and checking treat every format alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

Table = tuple[tuple[str, str], ...]
Shape = tuple[int, ...]
Span = tuple[int, int, int]  # (start, count, step) along one dimension
Box = tuple[Span, ...]  # for every dimension


@dataclass(frozen=True)
class Row:
    """How one of our tensors is stored there. `{}` in a name stands for a number, such as a layer's.

    ours                our name, or several: one behind the other along `axis` they are one tensor of theirs
    theirs              their name, or several: one behind the other along `axis` they are one tensor of ours, each as
                        long as `sizes` says. With `{e}` in it, a tensor for each index of our first dimension
    transposed          the last two dimensions are swapped
    interleaved_heads   this many heads lie along `axis`, and their rotary pairs stand side by side: row 2i + j of a head
                        is our row j head_dim/2 + i (Su et al. 2021, arXiv:2104.09864, against GPT-NeoX's halves)
    axis                a dimension of OUR tensor

    A plain pair (ours, theirs) is a row that only renames.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    interleaved_heads: int = 0
    axis: int = 0

    def __post_init__(self) -> None:
        parts = len(self.theirs) if isinstance(self.theirs, tuple) else 0
        if len(self.sizes) != parts:
            raise ValueError(f"{self} joins {parts} of their tensors: give as many sizes")
        if parts and (isinstance(self.ours, tuple) or self.interleaved_heads):
            raise ValueError(f"{self} splits one tensor of ours: it can be neither several of ours nor interleaved")
        if self.is_stacked and self.axis == 0 and (parts or isinstance(self.ours, tuple) or self.interleaved_heads):
            raise ValueError(f"{self} has a tensor for each index of our dimension 0: set axis to another one")

    @property
    def is_stacked(self) -> bool:
        return any("{e}" in name for name in _several(self.theirs))


Rows = tuple[Row | tuple[str, str], ...]


class Link(NamedTuple):
    """One rectangle. Its counts are equal on both sides, but for our first dimension where theirs has one less.

    Ours is always without gaps (steps of 1). transposed: the last two dimensions are swapped between the two boxes.
    """

    ours: str
    our_box: Box
    theirs: str
    their_box: Box
    transposed: bool


def links(rows: Rows, shapes: Mapping[str, Shape], tied: Table = ()) -> list[Link]:
    """Every element of our tensors, and of theirs, exactly once; the second name of a tied parameter is left out.

    shapes: the full shapes of our tensors by name; several of ours that are one of theirs are there together. Raises
    KeyError naming the tensors that no row knows, or whose row has others that lack; ValueError where it does not fit.
    """
    aliases = {alias for alias, _ in tied}
    patterns = list(_patterns(rows))
    found: list[Link] = []
    unknown = []
    for name, shape in shapes.items():
        if name in aliases:
            continue
        for pattern, row, place in patterns:
            if match := pattern.fullmatch(name):
                numbers = match.groups()
                joined = [part.format(*numbers) for part in _several(row.ours)]
                if lacking := [part for part in joined if part not in shapes]:
                    raise KeyError(f"{name} is one tensor of theirs together with {lacking}, which lack")
                offset = sum(shapes[part][row.axis] for part in joined[:place])
                found += _links_of(row, name, shape, numbers, offset)
                break
        else:
            unknown.append(name)
    if unknown:
        raise KeyError(f"no row of the table knows {len(unknown)} of {len(shapes)} tensors: {unknown[:5]}")
    return found


def their_shapes(found: Iterable[Link]) -> dict[str, Shape]:
    """The full shapes of their tensors, by name."""
    shapes: dict[str, Shape] = {}
    for link in found:
        ends = tuple(start + (count - 1) * step + 1 for start, count, step in link.their_box)
        known = shapes.get(link.theirs, ends)
        shapes[link.theirs] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return shapes


def slices(box: Box) -> tuple[slice, ...]:
    """The box as the index of an array."""
    return tuple(slice(start, start + count * step, step) for start, count, step in box)


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _patterns(rows: Rows) -> Iterator[tuple[re.Pattern[str], Row, int]]:
    """For each of our names: its pattern, its row, and how many stand before it in their tensor."""
    for given in rows:
        row = given if isinstance(given, Row) else Row(*given)
        for i, name in enumerate(_several(row.ours)):
            yield re.compile(re.escape(name).replace(r"\{\}", r"(\d+)")), row, i


def _links_of(row: Row, name: str, shape: Shape, numbers: tuple[str, ...], offset: int) -> Iterator[Link]:
    names = _several(row.theirs)
    for part, ours, (start, count, step) in _cuts(row, name, shape):
        for e in range(shape[0]) if row.is_stacked else (0,):
            our_box, their_box = [(0, n, 1) for n in shape], [(0, n, 1) for n in shape]
            if shape:
                our_box[row.axis], their_box[row.axis] = ours, (start + offset, count, step)
            if row.is_stacked:
                our_box[0] = (e, 1, 1)
                del their_box[0]
            if row.transposed:
                their_box[-2:] = reversed(their_box[-2:])
            yield Link(name, tuple(our_box), names[part].format(*numbers, e=e), tuple(their_box), row.transposed)


def _cuts(row: Row, name: str, shape: Shape) -> Iterator[tuple[int, Span, Span]]:
    """(which of their tensors, our span, their span) along the row's axis."""
    length = shape[row.axis] if shape else 1
    if row.interleaved_heads:
        half, rest = divmod(length, 2 * row.interleaved_heads)
        if rest:
            raise ValueError(f"{name} {shape} does not hold {row.interleaved_heads} heads of rotary pairs")
        for head in range(row.interleaved_heads):
            for j in range(2):
                yield 0, ((2 * head + j) * half, half, 1), (2 * head * half + j, half, 2)
        return
    sizes = row.sizes or (length,)
    if sum(sizes) != length:
        raise ValueError(f"{name} {shape} is not as long as its parts together: {row.theirs} with sizes {sizes}")
    for part, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        yield part, (end - size, size, 1), (0, size, 1)
