"""Draw the mesh as text: the coordinates of each rank. Never imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan_like.distributed.dims import MESH_ORDER

if TYPE_CHECKING:
    from torchtitan_like.distributed.dims import ParallelDims

MAX_LINES = 25
_MAX_COLUMNS = 16
# (pipeline ranks, rows of each) that are shown; the first pair that fits is used.
_EXTENTS = ((10**9, 10**9), (10**9, 6), (10**9, 4), (4, 6))


def picture(dims: ParallelDims, ranks_per_node: int | None = None) -> list[str]:
    """Return at most 25 lines: for each pipeline rank a grid of rank numbers with named axes.

    cp and tp are columns; shards and replicas are rows (columns if there is no cp or tp). "|" marks
    the start of a node, "..." omitted ranks. ranks_per_node None: unknown.
    """
    if dims.world_size == 1:
        return [title(dims, ranks_per_node)]
    pp, rows, columns = axes_of(dims)
    is_one_node = ranks_per_node is None or dims.world_size <= ranks_per_node
    node = None if is_one_node else ranks_per_node
    return [title(dims, ranks_per_node), *_grid(pp, rows, columns, dims.world_size, node)]


def title(dims: ParallelDims, ranks_per_node: int | None) -> str:
    """Return the number of ranks, the degrees above one, and the number of nodes above one."""
    axes = {name: getattr(dims, name) for name in MESH_ORDER if getattr(dims, name) > 1}
    if not axes:
        return "1 rank: nothing is sharded"
    text = (
        f"{dims.world_size} ranks = {' x '.join(f'{name} {size}' for name, size in axes.items())}"
    )
    num_nodes = -(-dims.world_size // ranks_per_node) if ranks_per_node else 1
    return text + (f", on {num_nodes} nodes of {ranks_per_node}" if num_nodes > 1 else "")


def axes_of(dims: ParallelDims) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the pipeline ranks, and the sizes of the dimensions in rows and in columns.

    cp and tp are columns, or the last other dimension without them.
    """
    axes = {name: getattr(dims, name) for name in MESH_ORDER if getattr(dims, name) > 1}
    pp = axes.pop("pp", 1)
    columns = {name: size for name, size in axes.items() if name in ("cp", "tp")}
    columns = columns or dict(list(axes.items())[-1:])
    return pp, {name: size for name, size in axes.items() if name not in columns}, columns


def _grid(
    pp: int, rows: dict[str, int], columns: dict[str, int], world_size: int, node: int | None
) -> list[str]:
    """Return one line for each column axis, then one for each row of each pipeline rank."""
    height, length = math.prod(rows.values()), math.prod(columns.values())
    right = _shorten(length, _MAX_COLUMNS)
    stages, down = next(
        (stages, down)
        for stages, down in ((_shorten(pp, a), _shorten(height, b)) for a, b in _EXTENTS)
        if sum(1 if stage is None else len(down) for stage in stages) + len(columns) < MAX_LINES
    )
    width = len(str(world_size - 1))
    body: list[tuple[str, str]] = []
    for stage in stages:
        if stage is None:
            body.append(("...", ""))
            continue
        for row in down:
            at = f"pp {stage}" if row == 0 else ""
            names = "..." if row is None else "  ".join(coordinates(rows, row))
            first = None if row is None else (stage * height + row) * length
            label = f"{at:{len(f'pp {pp - 1}')}}  {names}".rstrip() if pp > 1 else names
            cells = ""
            if first is not None:
                cells = _cells(first, right, width, node) + _nodes(first, length, node)
            body.append((label, cells))
    margin = max(len(label) for label, _ in body)
    margin = max(margin, *(len(name) for name in columns)) if columns else margin
    head = [_axis(name, columns, right, margin, width) for name in columns]
    lines = (*head, *(f"{label:{margin}}  {cells}" for label, cells in body))
    return [line.rstrip() for line in lines]


def _shorten(size: int, most: int) -> list[int | None]:
    """Return all indices of an axis; if more than `most`, the first ones, None, and the last."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]


def coordinates(axes: dict[str, int], index: int) -> list[str]:
    """Return the coordinates of a row or column on its axes as text: `tp 1`."""
    labels = []
    for name, size in reversed(axes.items()):
        index, coordinate = divmod(index, size)
        labels.append(f"{name} {coordinate}")
    return labels[::-1]


def _axis(
    name: str, columns: dict[str, int], right: list[int | None], margin: int, width: int
) -> str:
    """Return the coordinates of one axis above the ranks."""
    inner = math.prod(list(columns.values())[list(columns).index(name) + 1 :])
    labels = (
        "..." if index is None else f"{index // inner % columns[name]:>{width}}" for index in right
    )
    return f"{name:>{margin}}  {' '.join(labels)}"


def _cells(first: int, right: list[int | None], width: int, node: int | None) -> str:
    """Return the ranks of one row that starts with rank `first`."""
    text = ""
    for index in right:
        starts_node = index and node and (first + index) % node == 0
        text += "|" if starts_node else " "
        text += "..." if index is None else f"{first + index:>{width}}"
    return text[1:]


def _nodes(first: int, length: int, node: int | None) -> str:
    """Return the nodes of the `length` ranks of a row."""
    if node is None:
        return ""
    first_node, last_node = first // node, (first + length - 1) // node
    return (
        f"  node {first_node}" if first_node == last_node else f"  nodes {first_node}-{last_node}"
    )
