"""Draw a plan: what the memory holds, what each stream does in a step, and the layouts of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.distributed.schedule_view import Action
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.plan.plan_report import parts_of
from torchtitan_like.plan.record import Recording
from torchtitan_like.plan.timeline import (
    PARTS,
    Part,
    Played,
    StepTime,
    part_of,
    play_all,
    play_pipeline,
)
from torchtitan_like.util.pictures import GRAY, PALETTE, picture
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig
    from torchtitan_like.plan.clusters import Cluster
    from torchtitan_like.plan.extend import Estimate
    from torchtitan_like.plan.layouts import Layout

WIDTH = 10.0  # inches
ROW = 0.45  # inches of a rank or a stream
SHARPNESS = 4000  # spans of one color with a gap below 1/SHARPNESS of the step become one
# Colors of the parts: the palette, then the palette again, lighter.
STRENGTHS = (1.0, 0.45)

MAX_ACTIONS = 8192  # of a pipeline
CELL = 0.4  # inches, the height of a rank in a pipeline
UNIT = 0.32  # inches of the shortest action of a pipeline
STRENGTH = 0.7  # of the color of a rank's first stage
# Kind of an action -> color and name.
ACTIONS = {
    "F": (PALETTE[0], "forward"),
    "B": (PALETTE[1], "backward"),
    "I": (PALETTE[1], "backward of inputs"),
    "W": (PALETTE[2], "backward of weights"),
}

Starts = Sequence[Sequence[tuple[float, Action]]]  # of each action, by rank


def draw_plan(
    folder: Path,
    runs: Sequence[DryRun],
    memories: Sequence[RankMemory],
    time: StepTime | None,
    config: JobConfig,
    gpu: Gpu,
    cluster: Cluster,
) -> list[Path]:
    """Write memory.svg, streams.svg and pipeline.svg; return those that apply.

    time: of the same dry runs; None draws the memory alone. Without pipeline parallelism there is no
    pipeline.svg. Raises OSError, and ValueError for a step with too many actions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "memory.svg"]
    draw_memory(memories, gpu, written[0])
    if time is None:
        return written
    plays = play_all(runs, config, gpu, cluster)
    slowest = next(index for index, run in enumerate(runs) if run.rank == time.rank)
    written.append(folder / "streams.svg")
    draw_streams(runs[slowest].recording, plays[slowest], time.rank, written[-1])
    if len(runs) > 1:
        written.append(folder / "pipeline.svg")
        starts, seconds = play_pipeline(runs, plays, gpu, cluster)
        draw_pipeline(starts, seconds, time.seconds, written[-1])
    return written


def draw_memory(memories: Sequence[RankMemory], gpu: Gpu, path: Path) -> None:
    """Draw a bar for each rank: what its memory holds at the peak, next to the GPU's memory."""
    bars = [parts_of(memory, gpu) for memory in memories]
    names = [name for name in bars[0] if any(bar[name] for bar in bars)]
    with picture(path, WIDTH, 1.6 + ROW * len(bars)) as figure:
        axes = figure.subplots()
        for name, color in zip(names, _colors(len(names)), strict=True):
            lefts = [sum(list(bar.values())[: list(bar).index(name)]) for bar in bars]
            axes.barh(
                range(len(bars)),
                [bar[name] / GIB for bar in bars],
                left=[left / GIB for left in lefts],
                color=color,
                label=name,
            )
        axes.axvline(gpu.memory_gib, color=GRAY, linestyle="--", label=f"{gpu.name}")
        axes.set_yticks(range(len(bars)), [f"rank {memory.rank}" for memory in memories])
        axes.invert_yaxis()
        axes.set_xlabel("GiB at the peak of a step")
        _add_legend(figure)


def draw_streams(recording: Recording, played: Played, rank: int, path: Path) -> None:
    """Draw what each stream and each communicator of a rank does over a step."""
    from matplotlib.patches import Patch

    lanes = _lanes(recording, played)
    parts = [part for part in PARTS if any(part in lane for lane in lanes.values())]
    colors = dict(zip(parts, _colors(len(parts)), strict=True))
    with picture(path, WIDTH, 1.6 + ROW * len(lanes)) as figure:
        axes = figure.subplots()
        for row, lane in enumerate(lanes.values()):
            for part, spans in lane.items():
                merged = _merge(spans, played.seconds / SHARPNESS)
                boxes = [(1e3 * start, 1e3 * (end - start)) for start, end in merged]
                axes.broken_barh(boxes, (row - 0.4, 0.8), color=colors[part])
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.set_xlim(0, 1e3 * played.seconds)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlabel(f"ms of a step of rank {rank}, without waiting for other ranks")
        _add_legend(
            figure,
            handles=[
                Patch(color=color, label=part.removeprefix("exposed: "))
                for part, color in colors.items()
            ],
        )


def draw_pipeline(
    starts: Starts, seconds: Mapping[Action, float], step_seconds: float, path: Path
) -> None:
    """Draw the actions of each pipeline rank with the durations of a plan.

    starts: as `schedule_view.schedule` returns them, in seconds. Raises OSError, and
    ValueError for more than `MAX_ACTIONS`.
    """
    num_actions = sum(map(len, starts))
    if num_actions > MAX_ACTIONS:
        raise ValueError(
            f"The schedule has {num_actions:,} actions. Expected at most {MAX_ACTIONS:,}, which can "
            "be read. Draw a step with fewer micro-batches."
        )
    busy = [sum(seconds[action] for _, action in row) for row in starts]
    text = (
        f"Pipeline of {len(starts)} ranks: a step of {step_seconds:.3g} s, "
        f"{min(busy):.3g} to {max(busy):.3g} s of it in forward and backward passes"
    )
    unit = min(value for value in seconds.values() if value > 0)
    scaled = [[(start / unit, action) for start, action in row] for row in starts]
    draw_actions(text, scaled, {each: value / unit for each, value in seconds.items()}, path)


def draw_layouts(
    ranked: Sequence[tuple[Layout, Estimate]], gpu: Gpu, limit: float, path: Path
) -> None:
    """Draw the memory and the parts of a step for each layout of a search, the best one first.

    limit: fraction of the GPU's memory that a layout may use.
    """
    names = [f"{number}. {layout.name}" for number, (layout, _) in enumerate(ranked, start=1)]
    estimates = [estimate for _, estimate in ranked]
    bubbles = [each.bubble * each.seconds for each in estimates]
    exposed = [each.exposed for each in estimates]
    computing = [
        each.seconds - bubble - wait
        for each, bubble, wait in zip(estimates, bubbles, exposed, strict=True)
    ]
    with picture(path, WIDTH, 1.6 + ROW * len(ranked)) as figure:
        memory, step = figure.subplots(1, 2, sharey=True)
        memory.barh(names, [each.gib for each in estimates], color=PALETTE[5])
        memory.axvline(
            limit * gpu.memory_gib,
            color=GRAY,
            linestyle="--",
            label=f"{100 * limit:g} % of the memory of {gpu.name}",
        )
        memory.set_xlabel("GiB on the fullest rank")
        parts = {
            "computing and the rest": computing,
            "exposed communication": exposed,
            "bubble of the pipeline": bubbles,
        }
        lefts = [0.0] * len(ranked)
        for color, (part, values) in zip(PALETTE, parts.items(), strict=False):
            if any(values):
                step.barh(names, values, left=lefts, color=color, label=part)
                lefts = [left + value for left, value in zip(lefts, values, strict=True)]
        step.set_xlabel("seconds of a step")
        memory.invert_yaxis()
        _add_legend(figure)


def draw_actions(text: str, starts: Starts, durations: Mapping[Action, float], path: Path) -> None:
    """Draw a row of cells for each rank. Times are in units of `UNIT` inches."""
    end = max(start + durations[action] for row in starts for start, action in row)
    with picture(path, 1.2 + UNIT * max(end, 24), 1.3 + CELL * len(starts)) as figure:
        axes = empty_axes(figure, text)
        axes.set_xlim(-3, max(end, 24))
        axes.set_ylim(len(starts) + 1.6, 0)
        for rank, actions in enumerate(starts):
            axes.text(-0.3, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize="small")
            stages = sorted({action.stage for _, action in actions})
            for start, action in actions:
                color, _ = ACTIONS[action.kind]
                strength = STRENGTH / (1 + stages.index(action.stage))
                box = start, rank, durations[action]
                draw_cell(axes, box, str(action.micro_batch), color, strength)
        kinds = {action.kind for row in starts for _, action in row}
        for number, kind in enumerate(kind for kind in ACTIONS if kind in kinds):
            color, name = ACTIONS[kind]
            draw_cell(axes, (7 * number, len(starts) + 0.4, 1), "", color, STRENGTH)
            axes.text(7 * number + 1.3, len(starts) + 0.9, name, va="center", fontsize="small")


def empty_axes(figure: Any, text: str) -> Any:
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_title(text, loc="left", fontsize="medium")
    return axes


def draw_cell(
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


def _lanes(
    recording: Recording, played: Played
) -> dict[str, Mapping[Part, list[tuple[float, float]]]]:
    """Return the spans of each stream and each communicator, by part.

    Collectives run on a stream of their communicator, beside the stream that started them.
    """
    lanes: defaultdict[str, defaultdict[Part, list[tuple[float, float]]]]
    lanes = defaultdict(lambda: defaultdict(list))
    for span in played.spans:
        item = recording.work[span.item]
        name = recording.streams[item.stream]
        if item.group is not None:
            name = f"collectives of {item.group.size} ranks{_dimension(item.group.dimension)}"
        lanes[name][part_of(item)].append((span.start, span.end))
    compute = recording.streams[0]
    return {name: lanes[name] for name in sorted(lanes, key=lambda name: (name != compute, name))}


def _dimension(name: str) -> str:
    return f" ({name})" if name else ""


def _merge(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join spans that are less than `gap` apart."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _colors(number: int) -> list[tuple[float, float, float]]:
    """Return distinct colors."""
    from matplotlib.colors import to_rgb

    return [_lighter(to_rgb(color), strength) for strength in STRENGTHS for color in PALETTE][
        :number
    ]


def _lighter(color: tuple[float, float, float], strength: float) -> tuple[float, float, float]:
    red, green, blue = (1 - strength * (1 - channel) for channel in color)
    return red, green, blue


def _add_legend(figure: Any, **options: Any) -> None:
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize="small", **options)
