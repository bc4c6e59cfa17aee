"""Draw the mesh of a layout and the actions of a pipeline over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.mesh_picture import axes_of, coordinates, title
from torchtitan_like.distributed.schedule_view import DURATION, Action, Order, simulate
from torchtitan_like.util.pictures import GRAY, PALETTE, picture

Starts = Sequence[Sequence[tuple[float, Action]]]  # of each action, by rank

MAX_RANKS = 1024
MAX_ACTIONS = 8192
CELL = 0.4  # inches
LABEL_WIDTH = 2.6  # inches, of the coordinates of a row
STAGE_GAP = 0.5  # cells between the grids of two pipeline ranks
UNIT = 0.32  # inches of a forward pass
STRENGTH = 0.7  # of the color of a rank's first stage
# Kind of an action -> color and name.
ACTIONS = {
    "F": (PALETTE[0], "forward"),
    "B": (PALETTE[1], "backward"),
    "I": (PALETTE[1], "backward of inputs"),
    "W": (PALETTE[2], "backward of weights"),
}


def draw_mesh(dims: ParallelDims, ranks_per_node: int, path: Path) -> None:
    """Draw a grid of ranks for each pipeline rank; each node has a color.

    The ranks of a row communicate most. Raises OSError, and ValueError for more than `MAX_RANKS`.
    """
    if dims.world_size > MAX_RANKS:
        raise ValueError(
            f"The mesh has {dims.world_size:,} ranks. Expected at most {MAX_RANKS:,}, which can be "
            "read. Draw a smaller layout of the same degrees."
        )
    pp, rows, columns = axes_of(dims)
    num_rows, num_columns = math.prod(rows.values()), math.prod(columns.values())
    head = 0.5 * len(columns) + 0.3
    width, height = max(num_columns, 8), head + pp * (num_rows + STAGE_GAP)
    with picture(path, LABEL_WIDTH + CELL * width, CELL * (height + 1)) as figure:
        axes = _empty_axes(figure, title(dims, ranks_per_node))
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
            _draw_cell(axes, (column, top, 1), str(rank), color, strength=0.5)
            if column == 0:
                names = [f"pp {stage}"] if pp > 1 else []
                label = "  ".join([*names, *coordinates(rows, row % num_rows)])
                axes.text(-0.3, top + 0.5, label, ha="right", va="center", fontsize="small")


def draw_timeline(schedule: str, order: Order, path: Path) -> None:
    """Draw the actions of each rank over time, with the number of their micro-batch.

    The second and later stages of a rank are lighter. Raises OSError, and ValueError for more than
    `MAX_ACTIONS`.
    """
    _check_number_of_actions(order)
    timeline = simulate(order)
    num_stages = 1 + max(action.stage for row in order for action in row)
    num_micro_batches = 1 + max(action.micro_batch for row in order for action in row)
    text = (
        f"{schedule}: {num_stages} stages on {len(order)} ranks, {num_micro_batches} micro-batches, "
        f"bubble {timeline.bubble:.1%}"
    )
    durations = {action: float(DURATION[action.kind]) for row in order for action in row}
    _draw_actions(text, timeline.starts, durations, path)


def draw_pipeline(
    starts: Starts, seconds: Mapping[Action, float], step_seconds: float, path: Path
) -> None:
    """Draw the actions of each pipeline rank with the durations of a plan.

    starts: as `schedule_view.schedule` returns them, in seconds. Raises as `draw_timeline`.
    """
    _check_number_of_actions(starts)
    busy = [sum(seconds[action] for _, action in row) for row in starts]
    text = (
        f"Pipeline of {len(starts)} ranks: a step of {step_seconds:.3g} s, "
        f"{min(busy):.3g} to {max(busy):.3g} s of it in forward and backward passes"
    )
    unit = min(value for value in seconds.values() if value > 0)
    scaled = [[(start / unit, action) for start, action in row] for row in starts]
    _draw_actions(text, scaled, {each: value / unit for each, value in seconds.items()}, path)


def _check_number_of_actions(rows: Sequence[Sequence[object]]) -> None:
    num_actions = sum(map(len, rows))
    if num_actions > MAX_ACTIONS:
        raise ValueError(
            f"The schedule has {num_actions:,} actions. Expected at most {MAX_ACTIONS:,}, which can "
            "be read. Draw a step with fewer micro-batches."
        )


def _draw_actions(text: str, starts: Starts, durations: Mapping[Action, float], path: Path) -> None:
    """Draw a row of cells for each rank. Times are in units of `UNIT` inches."""
    end = max(start + durations[action] for row in starts for start, action in row)
    with picture(path, 1.2 + UNIT * max(end, 24), 1.3 + CELL * len(starts)) as figure:
        axes = _empty_axes(figure, text)
        axes.set_xlim(-3, max(end, 24))
        axes.set_ylim(len(starts) + 1.6, 0)
        for rank, actions in enumerate(starts):
            axes.text(-0.3, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize="small")
            stages = sorted({action.stage for _, action in actions})
            for start, action in actions:
                color, _ = ACTIONS[action.kind]
                strength = STRENGTH / (1 + stages.index(action.stage))
                box = start, rank, durations[action]
                _draw_cell(axes, box, str(action.micro_batch), color, strength)
        kinds = {action.kind for row in starts for _, action in row}
        for number, kind in enumerate(kind for kind in ACTIONS if kind in kinds):
            color, name = ACTIONS[kind]
            _draw_cell(axes, (7 * number, len(starts) + 0.4, 1), "", color, STRENGTH)
            axes.text(7 * number + 1.3, len(starts) + 0.9, name, va="center", fontsize="small")


def _empty_axes(figure: Any, text: str) -> Any:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_title(text, loc="left", fontsize="medium")
    return axes


def _draw_cell(
    axes: Any, box: tuple[float, float, float], text: str, color: str, strength: float
) -> None:
    """Draw a cell of height 1 with black text. box: left, top, width. strength: 0 is white."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    left, top, width = box
    tint = [1 - strength * (1 - part) for part in to_rgb(color)]
    axes.add_patch(Rectangle((left, top), width, 1, facecolor=tint, edgecolor=GRAY))
    middle = left + width / 2, top + 0.5
    axes.text(*middle, text, ha="center", va="center", fontsize="small", color="black")
