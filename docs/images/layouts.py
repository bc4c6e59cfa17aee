"""Draw the pictures of the guide to parallelism, a mesh and a pipeline schedule, next to this file.

    python docs/images/layouts.py [FOLDER]

Needs the extra `plot`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.schedule_view import DURATION, Order, order_of, simulate
from torchtitan_like.plan.plan_pictures import CELL, draw_actions, draw_cell, empty_axes
from torchtitan_like.util.pictures import PALETTE, picture

LABEL_WIDTH = 2.6  # inches, of the coordinates of a row
STAGE_GAP = 0.5  # cells between the grids of two pipeline ranks


def axes_of(dims: ParallelDims) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the pipeline ranks, and the sizes of the dimensions in rows and in columns.

    cp and tp are columns, or the last other dimension without them.
    """
    axes = dims.mesh_shape()
    pp = axes.pop("pp", 1)
    columns = {name: size for name, size in axes.items() if name in ("cp", "tp")}
    columns = columns or dict(list(axes.items())[-1:])
    return pp, {name: size for name, size in axes.items() if name not in columns}, columns


def coordinates(axes: dict[str, int], index: int) -> list[str]:
    """Return the coordinates of a row or column on its axes as text: `tp 1`."""
    labels = []
    for name, size in reversed(axes.items()):
        index, coordinate = divmod(index, size)
        labels.append(f"{name} {coordinate}")
    return labels[::-1]


def draw_mesh(dims: ParallelDims, ranks_per_node: int, path: Path) -> None:
    """Draw a grid of ranks for each pipeline rank; each node has a color.

    The ranks of a row communicate most.
    """
    pp, rows, columns = axes_of(dims)
    num_rows, num_columns = math.prod(rows.values()), math.prod(columns.values())
    head = 0.5 * len(columns) + 0.3
    width, height = max(num_columns, 8), head + pp * (num_rows + STAGE_GAP)
    with picture(path, LABEL_WIDTH + CELL * width, CELL * (height + 1)) as figure:
        axes = empty_axes(figure, dims.describe(ranks_per_node))
        axes.set_xlim(-LABEL_WIDTH / CELL, width)
        axes.set_ylim(height, 0)
        for column in range(num_columns):
            label = "\n".join(coordinates(columns, column))
            axes.text(column + 0.5, head - 0.1, label, ha="center", va="bottom", fontsize="x-small")
        for rank in range(dims.world_size):
            row, column = divmod(rank, num_columns)
            stage = row // num_rows
            top = head + row + stage * STAGE_GAP
            color = PALETTE[rank // ranks_per_node % len(PALETTE)]
            draw_cell(axes, (column, top, 1), str(rank), color, strength=0.5)
            if column == 0:
                names = [f"pp {stage}"] if pp > 1 else []
                label = "  ".join([*names, *coordinates(rows, row % num_rows)])
                axes.text(-0.3, top + 0.5, label, ha="right", va="center", fontsize="small")


def draw_schedule(schedule: str, order: Order, path: Path) -> None:
    """Draw the actions of each rank over time, with the number of their micro-batch."""
    timeline = simulate(order)
    num_stages = 1 + max(action.stage for row in order for action in row)
    num_micro_batches = 1 + max(action.micro_batch for row in order for action in row)
    text = (
        f"{schedule}: {num_stages} stages on {len(order)} ranks, {num_micro_batches} micro-batches, "
        f"bubble {timeline.bubble:.1%}"
    )
    durations = {action: float(DURATION[action.kind]) for row in order for action in row}
    draw_actions(text, timeline.starts, durations, path)


def main(folder: Path) -> None:
    draw_mesh(ParallelDims(16, pp=2, dp_shard=4, tp=2), 8, folder / "mesh.svg")
    draw_schedule("1F1B", order_of("1F1B", 4, 1, 8), folder / "pipeline.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
