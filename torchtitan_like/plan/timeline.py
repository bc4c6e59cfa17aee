"""Predict the time of a step: durations of the recorded work, played on streams as they wait.

The recording has the order in which the host issued the work, and each wait of one stream for
another. So overlap and prefetch are what the trainer does, not rules of this model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from torchtitan_like.config import JobConfig
from torchtitan_like.distributed.schedule_view import Action, Order, schedule
from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.durations import collective_seconds, durations, is_message, mfu_peak
from torchtitan_like.plan.gpus import FLASH_ATTENTION, Gpu
from torchtitan_like.plan.record import COMPUTE, Recording, WorkItem
from torchtitan_like.resolved import resolve_layout

Part = Literal[
    "matrix products",
    "attention",
    "other kernels",
    "optimizer",
    "exposed: data parallel",
    "exposed: tensor parallel",
    "exposed: context parallel",
    "exposed: expert parallel",
    "exposed: pipeline messages",
    "exposed: copies",
    "host",
    "bubble",
]
PARTS: tuple[Part, ...] = get_args(Part)

_KINDS: Mapping[str, Part] = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "other kernels",
    "copy": "exposed: copies",
}
# Of a collective, by the dimension of its process group. All others are data parallel.
_DIMENSIONS: Mapping[str, Part] = {
    "tp": "exposed: tensor parallel",
    "expert_tp": "exposed: tensor parallel",
    "cp": "exposed: context parallel",
    "ep": "exposed: expert parallel",
}
_HOST_WAITS = ("copy_to_host",)  # operators after which the host waits for the device


@dataclass(frozen=True)
class StepTime:
    """The predicted time of an optimizer step.

    seconds: from one step to the next. parts: their seconds on the slowest rank; they add up.
    tokens_per_second: of one GPU. mfu: percent. error_percent: of `seconds`, either way.
    bubble: fraction of the ranks' time. rank: the one whose parts these are.
    """

    seconds: float
    parts: dict[Part, float]
    tokens_per_second: float
    mfu: float
    error_percent: float
    rank: int


class Span(NamedTuple):
    """When an item of work runs, in seconds of the step. item: its index in `Recording.work`."""

    item: int
    start: float
    end: float


class Played(NamedTuple):
    """A rank's step without its peers.

    parts: seconds of the compute stream; they add up to `seconds`.
    actions: seconds of each action of the pipeline, in order; empty without one.
    spans: of all work that takes time, in the order in which the host issues it.
    """

    seconds: float
    parts: dict[Part, float]
    actions: list[tuple[Action, float]]
    spans: Sequence[Span] = ()

    @property
    def outside(self) -> float:
        """Seconds outside of the pipeline's actions, such as the optimizer's."""
        return self.seconds - sum(value for _, value in self.actions)


def step_time(runs: Sequence[DryRun], config: JobConfig, gpu: Gpu, cluster: Cluster) -> StepTime:
    """Return the time of the last step of the dry runs: one run of each pipeline rank, in order.

    Raises ValueError if pipeline ranks are missing, or the GPU has no peak for a dtype.
    """
    dims = runs[0].dims
    if len(runs) != dims.pp:
        raise ValueError(
            f"{len(runs)} dry runs of a pipeline of {dims.pp} ranks. Expected one of each: plan all "
            "of them, without --rank-of-stage"
        )
    plays = play_all(runs, config, gpu, cluster)
    ends = [played.seconds for played in plays]
    if dims.pp > 1:
        starts, seconds = play_pipeline(runs, plays, gpu, cluster)
        ends = _ends(starts, seconds.__getitem__, [played.outside for played in plays])
    slowest = max(range(len(plays)), key=lambda stage: ends[stage])
    total = ends[slowest]
    parts = plays[slowest].parts.copy()
    parts["bubble"] = total - plays[slowest].seconds
    run = resolve_layout(config, dims.world_size)
    num_gpus = dims.world_size * config.fault_tolerance.share[1]
    tokens = run.geometry.global_batch_size * config.training.seq_len / num_gpus / total
    return StepTime(
        seconds=total,
        parts={part: parts[part] for part in PARTS if parts.get(part, 0) > 0},
        tokens_per_second=tokens,
        mfu=100
        * tokens
        * run.flops_per_token
        / mfu_peak(config.training.mixed_precision_param, gpu),
        error_percent=cluster.error_percent,
        rank=runs[slowest].rank,
    )


def play_all(runs: Sequence[DryRun], config: JobConfig, gpu: Gpu, cluster: Cluster) -> list[Played]:
    """Return the last step of each run, as if its peers never let it wait."""
    fuses = config.compile.compiles_model
    if config.training.attention_backend == "flash":
        gpu = replace(gpu, attention=FLASH_ATTENTION)
    hidden = cluster.async_tp_hidden if config.parallelism.enable_async_tensor_parallel else 0.0
    plays = []
    for run in runs:
        seconds = durations(run.recording, gpu, cluster, fuses=fuses)
        if hidden:
            seconds = [
                value * (1 - hidden) if _is_tensor_parallel(item) else value
                for item, value in zip(run.recording.work, seconds, strict=True)
            ]
        recording = in_turn(run.recording) if gpu.device_type == "cpu" else run.recording
        plays.append(
            play(
                recording,
                seconds,
                gpu.host_operator_us * 1e-6,
                is_captured=config.compile.cuda_graphs,
            )
        )
    return plays


def in_turn(recording: Recording) -> Recording:
    """Return a recording whose collectives overlap with nothing: a CPU rank does them itself."""
    played = copy(recording)
    played.work = [item._replace(stream=COMPUTE, is_async=False) for item in recording.work]
    return played


# ---- one rank


def play(
    recording: Recording,
    seconds: Sequence[float],
    host_operator: float,
    *,
    is_captured: bool = False,
) -> Played:
    """Run the work between the last two marks on its streams, and return when all of it is done.

    An item starts when the host has issued it, its stream is free, and, for a collective, its
    process group is free: NCCL runs the collectives of a group one after another. Messages between
    stages take no time here. After a copy that the host reads, the host continues when it is done.
    seconds: of each item. host_operator: seconds in which the host issues one operator.
    is_captured: forward and backward are CUDA graphs, whose operators the host does not issue.
    """
    start, end = (mark.num_work for mark in recording.marks[-2:])
    streams: dict[int, float] = {}
    lanes: dict[str, float] = {}
    ends: dict[int, float] = {}  # of each item, and of all before it on its stream
    parts: defaultdict[Part, float] = defaultdict(float)
    boundaries = _boundaries(recording)
    clock_at: dict[int, float] = {}
    spans: list[Span] = []
    host = 0.0
    for index in range(start, end):
        item = recording.work[index]
        if index in boundaries:
            clock_at[index] = streams.get(COMPUTE, 0.0)
        now = streams.get(item.stream, 0.0)
        if item.kind == "wait":
            target = ends.get(item.waits_for, 0.0)
            if target > now and item.stream == COMPUTE:
                parts[part_of(recording.work[item.waits_for])] += target - now
            streams[item.stream] = ends[index] = max(now, target)
            continue
        if seconds[index] > 0 and (item.pass_ == "update" or not is_captured):
            host += host_operator
        begin = max(now, host)
        if item.stream == COMPUTE and host > now:
            parts["host"] += host - now
        duration = 0.0 if is_message(item) else seconds[index]
        if item.group is not None and not is_message(item):
            lane = max(begin, lanes.get(item.group.name, 0.0))
            finish = lanes[item.group.name] = lane + duration
        else:
            finish = begin + duration
        ends[index] = finish
        if duration > 0:
            spans.append(Span(index, finish - duration, finish))
        if item.op in _HOST_WAITS:
            host = finish
        if item.is_async:
            streams[item.stream] = begin
            continue
        if item.stream == COMPUTE:
            parts[part_of(item)] += finish - begin
        streams[item.stream] = finish
    clock_at[end] = streams.get(COMPUTE, 0.0)
    total = max(streams.values(), default=0.0)
    if total > clock_at[end]:
        parts["exposed: data parallel"] += total - clock_at[end]
    actions = [
        (span.action, clock_at[span.end] - clock_at[span.start])
        for span in recording.actions
        if start <= span.start and span.end <= end
    ]
    return Played(total, parts, actions, spans)


def _boundaries(recording: Recording) -> set[int]:
    return {index for span in recording.actions for index in (span.start, span.end)}


def part_of(item: WorkItem) -> Part:
    """Return to which part of the step an item of the compute stream belongs."""
    if item.kind != "collective":
        return "optimizer" if item.pass_ == "update" else _KINDS[item.kind]
    assert item.group is not None
    others: Part = "exposed: pipeline messages" if is_message(item) else "exposed: data parallel"
    return _DIMENSIONS.get(item.group.dimension, others)


def _is_tensor_parallel(item: WorkItem) -> bool:
    return item.group is not None and item.group.dimension == "tp"


# ---- pipelines


def pipeline_ends(
    order: Order, duration: Callable[[Action], float], outside: Sequence[float], message: float
) -> list[float]:
    """Return when each pipeline rank is done, if its actions wait for those of the others.

    outside: seconds of each rank after its last action. message: between two stages.
    """
    return _ends(schedule(order, duration, message), duration, outside)


def play_pipeline(
    runs: Sequence[DryRun], plays: Sequence[Played], gpu: Gpu, cluster: Cluster
) -> tuple[list[list[tuple[float, Action]]], dict[Action, float]]:
    """Return the start of each action by pipeline rank, and the seconds of each action.

    runs, plays: of each pipeline rank, in order.
    """
    message = max(message_seconds(run.recording, gpu, cluster) for run in runs)
    seconds = {action: value for played in plays for action, value in played.actions}
    order = [[action for action, _ in played.actions] for played in plays]
    return schedule(order, seconds.__getitem__, message), seconds


def _ends(
    starts: Sequence[Sequence[tuple[float, Action]]],
    duration: Callable[[Action], float],
    outside: Sequence[float],
) -> list[float]:
    return [
        row[-1][0] + duration(row[-1][1]) + rest for row, rest in zip(starts, outside, strict=True)
    ]


def message_seconds(recording: Recording, gpu: Gpu, cluster: Cluster) -> float:
    """Return the time of the longest message between stages."""
    messages = (item for item in recording.work if is_message(item))
    return max((collective_seconds(item, gpu, cluster) for item in messages), default=0.0)
