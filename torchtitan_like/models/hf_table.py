"""Map a model's tensors to another format's tensors, as pairs of rectangles with equal values.

Loading, exporting, and checking all use these pairs, so that every format is read and written by
the same code. *Native* names and shapes are this framework's; *external* ones are the other
format's (Hugging Face's, Meta's).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torchtitan_like.util.boxes import Box, BoxPair, Shape, Span, whole

Table = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Row:
    """One row of a model's table. `{}` in a name is a number, such as a layer's.

    native: a native name, or several names of tensors that one external tensor concatenates along
        `axis`.
    external: an external name, or several names of tensors that one native tensor concatenates
        along `axis`, with lengths `sizes`. A name with `{e}` has a tensor for each index of native
        dimension 0.
    transposed: the last two dimensions are swapped.
    interleaved_heads: number of heads along `axis` whose rotary pairs are adjacent in the external
        tensor. External row 2i + j of a head is native row j head_dim/2 + i (pairs as in
        arXiv:2104.09864, halves as in GPT-NeoX).
    alternating: joined tensors alternate along `axis` instead of being concatenated. Index i of
        the j-th of n native tensors is external index n i + j.
    copied: every index of native dimension 0 is a copy of the external tensor. Only for loading.
    axis: a dimension of the native tensor.

    A pair (native, external) is a row that only renames.
    """

    native: str | tuple[str, ...]
    external: str | tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    interleaved_heads: int = 0
    axis: int = 0
    alternating: bool = False
    copied: bool = False

    def __post_init__(self) -> None:
        num_external = len(self.external) if isinstance(self.external, tuple) else 0
        if len(self.sizes) != num_external:
            raise ValueError(f"{self} joins {num_external} external tensors: give as many sizes")
        is_joined = isinstance(self.native, tuple)
        if num_external and (is_joined or self.interleaved_heads):
            raise ValueError(
                f"{self} splits one native tensor: it can neither join several nor be interleaved"
            )
        if self.alternating and not is_joined:
            raise ValueError(f"{self} alternates one native tensor: expected several")
        is_divided = num_external or is_joined or self.interleaved_heads
        if self.is_stacked and self.axis == 0 and is_divided:
            raise ValueError(
                f"{self} has an external tensor for each index of native dimension 0: set axis to "
                "another dimension"
            )

    @property
    def is_stacked(self) -> bool:
        return self.copied or any("{e}" in name for name in _as_tuple(self.external))


Rows = tuple[Row | tuple[str, str], ...]


class Link(NamedTuple):
    """Two rectangles with the same values: one of a native tensor, one of an external tensor.

    The counts of both boxes are equal, except that a stacked native tensor has one more leading
    dimension. The native box always has steps of 1. transposed: the last two dimensions are
    swapped between the boxes.
    """

    native: str
    native_box: Box
    external: str
    external_box: Box
    transposed: bool

    @property
    def boxes(self) -> BoxPair:
        """Both boxes, from native to external."""
        return BoxPair(self.native_box, self.external_box, self.transposed)


def links(rows: Rows, shapes: Mapping[str, Shape], tied: Table = ()) -> list[Link]:
    """Return links that cover every element of all native and external tensors exactly once.

    A row with `copied` covers its external tensor once for each index of native dimension 0.

    shapes: full shapes by native name. Tensors that a row joins must all be present.
    tied: pairs (alias, name); aliases are left out.

    Raises KeyError naming the tensors that match no row, or whose row joins absent tensors.
    Raises ValueError if a shape does not fit its row.
    """
    aliases = {alias for alias, _ in tied}
    patterns = list(_patterns(rows))
    result: list[Link] = []
    unknown = []
    for name, shape in shapes.items():
        if name in aliases:
            continue
        for pattern, row, index in patterns:
            if match := pattern.fullmatch(name):
                numbers = match.groups()
                joined = [part.format(*numbers) for part in _as_tuple(row.native)]
                if absent := [part for part in joined if part not in shapes]:
                    raise KeyError(f"{name} and {absent} together are one external tensor; {absent} "
                                   "are absent")  # fmt: skip
                offset = sum(shapes[part][row.axis] for part in joined[:index])
                stride = 1
                if row.alternating:
                    offset = index
                    stride = len(joined)
                    _check_equal_shapes(joined, shapes)
                result += _links_of(row, name, shape, numbers, offset, stride)
                break
        else:
            unknown.append(name)
    if unknown:
        raise KeyError(
            f"no row of the table matches {len(unknown)} of {len(shapes)} tensors: {unknown[:5]}"
        )
    return result


def external_shapes(links: Iterable[Link]) -> dict[str, Shape]:
    """Return the full shapes of the external tensors, by name."""
    shapes: dict[str, Shape] = {}
    for link in links:
        ends = tuple(start + (count - 1) * step + 1 for start, count, step in link.external_box)
        shape = shapes.get(link.external, ends)
        shapes[link.external] = tuple(max(pair) for pair in zip(shape, ends, strict=True))
    return shapes


def count_named(rows: Rows, names: Iterable[str]) -> int:
    """Return the number of these external names that the table contains."""
    externals = [_as_tuple(row.external if isinstance(row, Row) else row[1]) for row in rows]
    escaped = [re.escape(name) for group in externals for name in group]
    pattern = re.compile("|".join(re.sub(r"\\{e?\\}", r"\\d+", name) for name in escaped))
    return sum(pattern.fullmatch(name) is not None for name in names)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _patterns(rows: Rows) -> Iterator[tuple[re.Pattern[str], Row, int]]:
    """Yield for each native name its pattern, its row, and its index among the joined tensors."""
    for entry in rows:
        row = entry if isinstance(entry, Row) else Row(*entry)
        for i, name in enumerate(_as_tuple(row.native)):
            yield re.compile(re.escape(name).replace(r"\{\}", r"(\d+)")), row, i


def _check_equal_shapes(names: list[str], shapes: Mapping[str, Shape]) -> None:
    if len({shapes[name] for name in names}) > 1:
        sizes = ", ".join(f"{name} {shapes[name]}" for name in names)
        raise ValueError(f"{sizes} alternate in one tensor: expected equal shapes")


def _links_of(
    row: Row, name: str, shape: Shape, numbers: tuple[str, ...], offset: int, stride: int
) -> Iterator[Link]:
    names = _as_tuple(row.external)
    for index, native, (start, count, step) in _spans(row, name, shape):
        for e in range(shape[0]) if row.is_stacked else (0,):
            native_box, external_box = list(whole(shape)), list(whole(shape))
            if shape:
                native_box[row.axis] = native
                external_box[row.axis] = (start * stride + offset, count, step * stride)
            if row.is_stacked:
                native_box[0] = (e, 1, 1)
                del external_box[0]
            if row.transposed:
                external_box[-2:] = reversed(external_box[-2:])
            external = names[index].format(*numbers, e=e)
            yield Link(name, tuple(native_box), external, tuple(external_box), row.transposed)


def _spans(row: Row, name: str, shape: Shape) -> Iterator[tuple[int, Span, Span]]:
    """Yield (index of the external tensor, native span, external span) along the row's axis."""
    length = shape[row.axis] if shape else 1
    if row.interleaved_heads:
        half, remainder = divmod(length, 2 * row.interleaved_heads)
        if remainder:
            raise ValueError(
                f"{name} {shape} does not hold {row.interleaved_heads} heads of rotary pairs"
            )
        for head in range(row.interleaved_heads):
            for j in range(2):
                native = ((2 * head + j) * half, half, 1)
                yield 0, native, (2 * head * half + j, half, 2)
        return
    sizes = row.sizes or (length,)
    if sum(sizes) != length:
        raise ValueError(
            f"{name} {shape} is not as long as its parts together: {row.external} with sizes {sizes}"
        )
    for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        yield index, (end - size, size, 1), (0, size, 1)
