"""The mesh as a picture: which rank stands where. No torch is imported."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan_like.distributed.dims import MESH_ORDER

if TYPE_CHECKING:
    from torchtitan_like.distributed.dims import ParallelDims

MOST_LINES = 25
_MOST_COLUMNS = 16
# Pipeline ranks, and rows of each, that are shown; the first pair that fits is taken.
_EXTENTS = ((10**9, 10**9), (10**9, 6), (10**9, 4), (4, 6))


def picture(dims: ParallelDims, ranks_per_node: int | None = None) -> list[str]:
    """Lines for the log, at most 25: for each pipeline rank a grid of rank numbers whose axes are named.

    What is cut inside a sequence or a layer runs to the right, shards and copies run down (to the right, when nothing
    else does). "|" stands where another node begins, "..." for what is left out. ranks_per_node None: not known.
    """
    cut = {name: getattr(dims, name) for name in MESH_ORDER if getattr(dims, name) > 1}
    if not cut:
        return ["1 rank: nothing is cut"]
    title = f"{dims.world_size} ranks = {' x '.join(f'{name} {size}' for name, size in cut.items())}"
    num_nodes = -(-dims.world_size // ranks_per_node) if ranks_per_node else 1
    if num_nodes > 1:
        title += f", on {num_nodes} nodes of {ranks_per_node}"
    pp = cut.pop("pp", 1)
    columns = {name: size for name, size in cut.items() if name in ("cp", "tp")} or dict(list(cut.items())[-1:])
    rows = {name: size for name, size in cut.items() if name not in columns}
    return [title, *_grid(pp, rows, columns, dims.world_size, ranks_per_node if num_nodes > 1 else None)]


def _grid(pp: int, rows: dict[str, int], columns: dict[str, int], world_size: int, node: int | None) -> list[str]:
    """One line for each axis that runs to the right, then one for each row of each pipeline rank."""
    height, length = math.prod(rows.values()), math.prod(columns.values())
    right = _shorten(length, _MOST_COLUMNS)
    stages, down = next(
        (stages, down)
        for stages, down in ((_shorten(pp, a), _shorten(height, b)) for a, b in _EXTENTS)
        if sum(1 if stage is None else len(down) for stage in stages) + len(columns) < MOST_LINES
    )
    width = len(str(world_size - 1))
    body: list[tuple[str, str]] = []
    for stage in stages:
        if stage is None:
            body.append(("...", ""))
            continue
        for row in down:
            at = f"pp {stage}" if row == 0 else ""
            names = "..." if row is None else "  ".join(_coordinates(rows, row))
            first = None if row is None else (stage * height + row) * length
            label = f"{at:{len(f'pp {pp - 1}')}}  {names}".rstrip() if pp > 1 else names
            body.append(
                (label, "" if first is None else _cells(first, right, width, node) + _nodes(first, length, node))
            )
    margin = max(len(label) for label, _ in body)
    margin = max(margin, *(len(name) for name in columns)) if columns else margin
    head = [_axis(name, columns, right, margin, width) for name in columns]
    return [line.rstrip() for line in (*head, *(f"{label:{margin}}  {cells}" for label, cells in body))]


def _shorten(size: int, most: int) -> list[int | None]:
    """All places of an axis; or, where they are more than `most`, the first ones, None, and the last one."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]


def _coordinates(axes: dict[str, int], index: int) -> list[str]:
    """The place of a row on each of its axes, as words."""
    words = []
    for name, size in reversed(axes.items()):
        index, place = divmod(index, size)
        words.append(f"{name} {place}")
    return words[::-1]


def _axis(name: str, columns: dict[str, int], right: list[int | None], margin: int, width: int) -> str:
    """The places of one axis above the ranks."""
    inner = math.prod(list(columns.values())[list(columns).index(name) + 1 :])
    places = ("..." if place is None else f"{place // inner % columns[name]:>{width}}" for place in right)
    return f"{name:>{margin}}  {' '.join(places)}"


def _cells(first: int, right: list[int | None], width: int, node: int | None) -> str:
    """The ranks of one row, whose first one is `first`."""
    text = ""
    for place in right:
        begins_node = place and node and (first + place) % node == 0
        text += ("|" if begins_node else " ") + ("..." if place is None else f"{first + place:>{width}}")
    return text[1:]


def _nodes(first: int, length: int, node: int | None) -> str:
    """The nodes that hold the `length` ranks of a row."""
    if node is None:
        return ""
    begin, end = first // node, (first + length - 1) // node
    return f"  node {begin}" if begin == end else f"  nodes {begin}-{end}"
