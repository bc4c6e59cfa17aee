"""Dry-run a layout, and extend what it takes to its number of layers and micro-batches.

A few layers and micro-batches are dry-run, because repeated ones take the same time and memory:

- Time and reserved memory are linear in the layers of a stage, from two depths. The allocator's
  fragmentation is not quite linear, so the finalists of a search are dry-run at full depth.
- Without a pipeline, each further micro-batch takes as long as the first one of two.
- With a pipeline, the schedule of all micro-batches runs with the recorded durations of its actions.
  Each further micro-batch adds the buffers of its messages.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchtitan_like.config import JobConfig
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.schedule_view import Action, order_of, refusal
from torchtitan_like.distributed.stages import SCHEDULES
from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.dry_memory import memory_of_all
from torchtitan_like.plan.dry_run import DryRun, Job, options_of, ranks_of_stages
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.layouts import GLOBAL_BATCH, Layout, Space, apply, with_settings
from torchtitan_like.plan.plan_report import needed_gib
from torchtitan_like.plan.record import Mark
from torchtitan_like.plan.timeline import Played, message_seconds, pipeline_ends, play_all
from torchtitan_like.resolved import resolve_layout
from torchtitan_like.util.units import GIB

# Layers of each stage at the two depths.
DEPTHS = (3, 5)
# With several stages on a rank, a step has its most memory after so many micro-batches for each rank.
MICRO_BATCHES_PER_RANK = 2

Value = Mapping[str, float]


class Depth(NamedTuple):
    """Layers of a stage that are dry-run; and of the model, for `model.args.n_layers`."""

    per_stage: float
    num_layers: int


def depths_of(layout: Layout, space: Space) -> tuple[Depth, ...]:
    """Return the two depths at which a layout is dry-run; the full one alone if that is no deeper."""
    full = full_depth(layout, space)
    if full.per_stage <= DEPTHS[1]:
        return (full,)
    ends = space.num_slots - space.num_layers if layout.pp > 1 else 0
    return tuple(Depth(n, n * layout.num_stages - ends) for n in DEPTHS)


def full_depth(layout: Layout, space: Space) -> Depth:
    """Return the depth of the model itself, by its stages with the most layers."""
    slots = space.num_slots if layout.pp > 1 else space.num_layers
    return Depth(math.ceil(slots / layout.num_stages), space.num_layers)


def few_micro_batches(layout: Layout) -> int:
    """Return the micro-batches to dry-run, after which more neither need memory nor differ.

    With one stage on a rank: as many as the first rank keeps, and one more, whose backward finds all
    gradients allocated.
    """
    if layout.pipeline is None:
        return min(layout.num_micro, 2)
    name = layout.pipeline.schedule
    is_multi = SCHEDULES[name].is_multi
    few = MICRO_BATCHES_PER_RANK * layout.pp if is_multi else layout.pp + 1
    if few >= layout.num_micro or refusal(name, few, layout.pp, layout.num_stages):
        return layout.num_micro
    return few


def ranks_to_run(dims: ParallelDims, layout: Layout) -> list[int]:
    """Return ranks with the first, a middle and the last stage. Other ranks repeat the middle one."""
    ranks = ranks_of_stages(dims)
    has_middle = layout.pipeline is None or layout.pipeline.stages_per_rank > 1
    chosen = [0, layout.pp - 1] if has_middle else [0, min(1, layout.pp - 1), layout.pp - 1]
    return [ranks[stage] for stage in dict.fromkeys(chosen)]


def jobs_of(layout: Layout, space: Space, depth: Depth, gpu: Gpu, num_steps: int) -> list[Job]:
    """Return the dry runs of a layout at one depth."""
    samples = few_micro_batches(layout) * layout.micro_batch * layout.dp
    config = with_settings(apply(layout, space), {GLOBAL_BATCH: samples})
    if depth.num_layers != space.num_layers:
        args = {**config.model.args, "n_layers": depth.num_layers}
        per_stage = None
        if layout.pipeline is not None and _has_other_stages(layout):
            per_stage = int(depth.per_stage)
        config = with_settings(
            config,
            {
                "model.args": args,
                "parallelism.pipeline_parallel_layers_per_stage": per_stage,
            },
        )
    options = {**options_of(gpu), "num_steps": num_steps}
    dims = resolve_layout(config, space.world_size).dims
    return [Job(config, space.world_size, rank, options) for rank in ranks_to_run(dims, layout)]


def _has_other_stages(layout: Layout) -> bool:
    """Return True if the number of stages is not the default of the schedule."""
    assert layout.pipeline is not None
    is_multi = SCHEDULES[layout.pipeline.schedule].is_multi
    return layout.pipeline.stages_per_rank != (2 if is_multi else 1)


@dataclass(frozen=True)
class Estimate:
    """What a layout takes, for its whole depth and step.

    gib: memory of the fullest rank, with what is outside of the allocator. seconds: of a step.
    bubble: fraction of a pipeline's time. exposed: seconds that wait for communication.
    is_full: whether the whole depth was dry-run.
    """

    gib: float
    seconds: float
    bubble: float
    exposed: float
    is_full: bool


def estimate(
    layout: Layout,
    space: Space,
    by_depth: Mapping[Depth, Sequence[DryRun]],
    gpu: Gpu,
    cluster: Cluster,
) -> Estimate:
    """Combine the dry runs of `jobs_of` at one or two depths."""
    full = full_depth(layout, space).per_stage
    config = apply(layout, space)
    values = [
        (depth.per_stage, measure(layout, config, runs, gpu, cluster))
        for depth, runs in by_depth.items()
    ]
    value = extend(values, full)
    whole = _pipeline(layout, value) if layout.pipeline else _accumulated(layout, value)
    is_full = any(depth.num_layers == space.num_layers for depth in by_depth)
    return Estimate(value["gib"], *whole, is_full)


def extend(values: Sequence[tuple[float, Value]], at: float) -> dict[str, float]:
    """Return each value on the line through two depths; the values of a single depth unchanged.

    A key that only one depth has counts as 0 at the other.
    """
    if len(values) == 1:
        return dict(values[0][1])
    (low, at_low), (high, at_high) = values
    share = (at - low) / (high - low)
    return {
        key: at_low.get(key, 0.0) + share * (at_high.get(key, 0.0) - at_low.get(key, 0.0))
        for key in {**at_low, **at_high}
    }


def measure(
    layout: Layout, config: JobConfig, runs: Sequence[DryRun], gpu: Gpu, cluster: Cluster
) -> dict[str, float]:
    """Return the memory and the durations of the recorded ranks, by name.

    `gib`: of the fullest rank. Without a pipeline: seconds of the recorded `step`, of which
    `exposed` to communication, and of one micro-batch: `micro`, `exposed micro`. With a pipeline:
    `<position> <kind>` of each action, `outside` of actions, of a `message` between stages, and
    `exposed` in a micro-batch.
    """
    values = {
        "gib": max(
            needed_gib(memory, gpu) + _buffers_gib(run, layout)
            for run, memory in zip(runs, memory_of_all(runs, config, gpu), strict=True)
        ),
        "message": max(message_seconds(run.recording, gpu, cluster) for run in runs),
    }
    plays = play_all(runs, config, gpu, cluster)
    if layout.pipeline is None:
        (played,) = plays
        values |= {"step": played.seconds, "exposed": _exposed(played)}
        if layout.num_micro > 1:
            (later,) = play_all(list(map(_after_first_micro_batch, runs)), config, gpu, cluster)
            values["micro"] = played.seconds - later.seconds
            values["exposed micro"] = _exposed(played) - _exposed(later)
        return values
    by_kind: dict[str, list[float]] = {}
    for action, duration in (each for played in plays for each in played.actions):
        by_kind.setdefault(f"{_position(action.stage, layout)} {action.kind}", []).append(duration)
    values |= {key: statistics.median(each) for key, each in by_kind.items()}
    values["outside"] = max(played.outside for played in plays)
    values["exposed"] = max(map(_exposed, plays)) / few_micro_batches(layout)
    return values


def _buffers_gib(run: DryRun, layout: Layout) -> float:
    """Return the buffers of the messages of micro-batches that are not dry-run, GiB.

    Each stage of torch's pipelines keeps a buffer for what it receives of every micro-batch.
    """
    few = few_micro_batches(layout)
    start, end = (mark.num_work for mark in run.recording.marks[-2:])
    received = sum(item.num_bytes for item in run.recording.work[start:end] if item.op == "recv")
    return (layout.num_micro - few) * received / few / GIB


def _after_first_micro_batch(run: DryRun) -> DryRun:
    """Return a run whose last step begins with its second micro-batch."""
    marks = run.recording.marks
    starts = [index for index in run.recording.micro_batches if index >= marks[-2].num_work]
    later = copy.copy(run.recording)
    later.marks = [Mark("later micro-batches", 0, starts[1]), marks[-1]]
    return replace(run, recording=later)


def _exposed(played: Played) -> float:
    return sum(value for part, value in played.parts.items() if part.startswith("exposed"))


def _position(stage: int, layout: Layout) -> str:
    """Return which stages take as long as this one."""
    return {0: "first", layout.num_stages - 1: "last"}.get(stage, "middle")


def _accumulated(layout: Layout, value: Value) -> tuple[float, float, float]:
    """Return seconds, bubble and exposed seconds of a step without a pipeline."""
    more = layout.num_micro - few_micro_batches(layout)
    return (
        value["step"] + more * value.get("micro", 0.0),
        0.0,
        value["exposed"] + more * value.get("exposed micro", 0.0),
    )


def _pipeline(layout: Layout, value: Value) -> tuple[float, float, float]:
    """Return seconds, bubble and exposed seconds of a step with a pipeline."""
    assert layout.pipeline is not None
    order = order_of(
        layout.pipeline.schedule, layout.pp, layout.pipeline.stages_per_rank, layout.num_micro
    )

    def seconds(action: Action) -> float:
        key = f"{_position(action.stage, layout)} {action.kind}"
        return value.get(key, value.get(f"first {action.kind}", 0.0))

    outside = [value["outside"]] * layout.pp
    total = max(pipeline_ends(order, seconds, outside, value["message"]))
    busy = sum(seconds(action) for row in order for action in row) / layout.pp
    bubble = 1 - (busy + value["outside"]) / total
    return total, bubble, value["exposed"] * layout.num_micro


def all_jobs(
    layouts: Sequence[Layout], space: Space, gpu: Gpu, *, is_full: bool
) -> Iterator[tuple[Layout, Depth, Job]]:
    """Yield the dry runs of several layouts. One step at few layers, the usual two at full depth."""
    for layout in layouts:
        depths = (full_depth(layout, space),) if is_full else depths_of(layout, space)
        for depth in depths:
            for job in jobs_of(layout, space, depth, gpu, num_steps=2 if is_full else 1):
                yield layout, depth, job
