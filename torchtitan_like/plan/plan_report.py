"""Show a plan: its memory and its step time as tables and JSON, and the plan file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_like.config import JobConfig
from torchtitan_like.plan.clusters import Cluster, clusters_with
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.plan.record import CATEGORIES
from torchtitan_like.plan.timeline import StepTime
from torchtitan_like.process_start import ALLOCATOR, has_expandable_segments
from torchtitan_like.util.plan_file import PlanFile, settings_of
from torchtitan_like.util.units import GIB

# What is outside of the tensors' memory, by type of device.
OUTSIDE = {"cuda": "CUDA context and NCCL (assumed)", "cpu": "Python and libraries"}
FRAGMENTATION = "rounding and other streams' pools"


# ---- memory


def needed_gib(memory: RankMemory, gpu: Gpu) -> float:
    """Return the memory of a GPU, or of a CPU's host, that a rank takes, GiB."""
    return memory.reserved / GIB + gpu.outside_gib


def fits(memories: Sequence[RankMemory], gpu: Gpu) -> bool:
    """Return True if every rank fits on the GPU."""
    return all(needed_gib(memory, gpu) <= gpu.memory_gib for memory in memories)


def verdict(memories: Sequence[RankMemory], gpu: Gpu) -> str:
    """Return a sentence on whether the fullest rank fits."""
    fullest = max(memories, key=lambda memory: memory.reserved)
    needed = needed_gib(fullest, gpu)
    answer = "fits" if needed <= gpu.memory_gib else "does not fit"
    return (
        f"{gpu.name}: {needed:.1f} of {gpu.memory_gib:.1f} GiB "
        f"({100 * needed / gpu.memory_gib:.0f} %) on the fullest rank, {fullest.rank}: {answer}"
    )


def memory_lines(memories: Sequence[RankMemory], gpu: Gpu, notes: Sequence[str]) -> Iterator[str]:
    """Yield the lines that `titan plan X.toml` prints.

    notes: what the dry run assumes.
    """
    has_stages = len(memories) > 1
    titles = [f"stage {memory.stage}" if has_stages else "GiB" for memory in memories]
    yield f"{'GiB at the peak of a step' if has_stages else '':34}" + "".join(
        f"{title:>10}" for title in titles
    )
    for category in CATEGORIES:
        values = [memory.by_category.get(category, 0) for memory in memories]
        if any(values):
            yield _row(category, values)
    yield _row("= active (live tensors)", [sum(m.by_category.values()) for m in memories])
    if gpu.device_type == "cuda":  # the C library's allocator is not modeled
        yield _row(FRAGMENTATION, [m.fragmentation for m in memories])
        yield _row("= reserved by the allocator", [m.reserved for m in memories])
    yield _row(OUTSIDE[gpu.device_type], [round(gpu.outside_gib * GIB)] * len(memories))
    if any(memory.host for memory in memories):
        yield _row("host memory of tensors, each rank", [m.host for m in memories])
    yield ""
    for memory in memories:
        yield f"Rank {memory.rank}: the peak is in {memory.moment}"
    for note in notes:
        yield f"Note: {note}"
    yield verdict(memories, gpu)


def allocator_note(gpu: Gpu) -> list[str]:
    """Return which allocator of a GPU is assumed: that of a run that starts with this environment."""
    if gpu.device_type != "cuda":
        return []
    has = "has" if has_expandable_segments(os.environ) else "has no"
    return [f"the allocator {has} expandable segments, as in a run with this {ALLOCATOR[0]}"]


def _row(title: str, values: Sequence[int]) -> str:
    return f"{title:34}" + "".join(f"{value / GIB:10.2f}" for value in values)


def parts_of(memory: RankMemory, gpu: Gpu) -> dict[str, int]:
    """Return what a GPU's memory holds at the peak of a rank, in bytes; they add up."""
    categories: dict[str, int] = {
        category: memory.by_category.get(category, 0) for category in CATEGORIES
    }
    return categories | {
        FRAGMENTATION: memory.fragmentation,
        OUTSIDE[gpu.device_type]: round(gpu.outside_gib * GIB),
    }


def memory_as_json(
    memories: Sequence[RankMemory], gpu: Gpu, notes: Sequence[str]
) -> dict[str, Any]:
    """Return what `--json` prints. All sizes are bytes."""
    return {
        "gpu": gpu.key,
        "gpu_bytes": round(gpu.memory_gib * GIB),
        "outside_allocator_bytes": round(gpu.outside_gib * GIB),
        "fits": fits(memories, gpu),
        "ranks": [asdict(memory) | {"fragmentation": memory.fragmentation} for memory in memories],
        "notes": list(notes),
    }


# ---- time


def caveats(gpu: Gpu, cluster: Cluster) -> list[str]:
    """Return what a reader must know about the times of this GPU and cluster."""
    notes = []
    compared = [each.key for each in clusters_with(gpu.key)]
    if not compared:
        notes.append(f"unvalidated: no run on this GPU, {gpu.name}, was compared with these times")
    elif len(compared) == 1:
        notes.append(f"runs on this GPU were compared in one cluster only: {compared[0]}")
    if Path(cluster.gpu).stem not in ("", gpu.key):
        notes.append(f"the constants of cluster {cluster.key} were fitted on {cluster.gpu}")
    if gpu.device_type == "cpu":
        notes.append(
            "times of CPU ranks are CPU seconds: on as many free cores, and without waiting"
        )
    if not cluster.fitted_rows:
        notes.append("the speed is not fitted to runs of this cluster")
    if cluster.error_source:
        notes.append(f"+-{cluster.error_percent:g} %: {cluster.error_source}")
    return notes


def time_lines(time: StepTime, gpu: Gpu, cluster: Cluster) -> Iterator[str]:
    """Yield the lines that `titan plan X.toml` prints about time."""
    yield ""
    yield f"{'Seconds of a step on rank ' + str(time.rank):34}{'':>10}     share"
    for part, seconds in time.parts.items():
        yield f"{part:34}{seconds:10.4f}{100 * seconds / time.seconds:8.1f} %"
    yield f"{'= step':34}{time.seconds:10.4f}"
    yield f"Cluster: {cluster.name}"
    for note in caveats(gpu, cluster):
        yield f"Note: {note}"
    device = {"cuda": "GPU", "cpu": "rank"}[gpu.device_type]
    yield (
        f"{time.seconds:.3g} s a step, {time.tokens_per_second:,.0f} tokens/s of each {device}, "
        f"MFU {time.mfu:.1f} %: each +-{time.error_percent:g} %"
    )


def time_as_json(time: StepTime, gpu: Gpu, cluster: Cluster) -> dict[str, Any]:
    """Return what `--json` prints about time."""
    return {"cluster": cluster.key, **asdict(time), "notes": caveats(gpu, cluster)}


# ---- the plan file


def plan_of(
    config: JobConfig,
    world_size: int,
    memories: Sequence[RankMemory],
    time: StepTime | None,
    gpu: Gpu,
    cluster: Cluster,
) -> PlanFile:
    """Return the plan file of a configuration.

    memories: of one rank of each stage, rank 0 first. time: None if it was not predicted.
    """
    first = memories[0]
    assert first.rank == 0, first.rank
    return PlanFile(
        settings=settings_of(config.model_dump(), world_size),
        gpu=gpu.key,
        cluster=cluster.key,
        reserved=first.reserved / GIB,
        active=first.active / GIB,
        fullest=max(needed_gib(memory, gpu) for memory in memories),
        step_seconds=None if time is None else time.seconds,
        error_percent=None if time is None else time.error_percent,
        modules=first.modules,
    )
