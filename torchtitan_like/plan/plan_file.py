"""Make the plan file of a configuration from its dry runs."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_like.config import JobConfig
from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.plan.memory_report import needed_gib
from torchtitan_like.plan.timeline import StepTime
from torchtitan_like.util.plan_file import PlanFile, settings_of
from torchtitan_like.util.units import GIB


def plan_of(
    config: JobConfig,
    world_size: int,
    memories: Sequence[RankMemory],
    time: StepTime | None,
    gpu: Gpu,
    cluster: Cluster,
) -> PlanFile:
    """Return the plan file. memories: of one rank of each stage, with rank 0 first.

    time: None if it was not predicted.
    """
    first = memories[0]
    assert first.rank == 0, first.rank
    return PlanFile(
        settings=settings_of(config.model_dump(exclude_none=True), world_size),
        gpu=gpu.key,
        cluster=cluster.key,
        reserved=first.reserved / GIB,
        active=first.active / GIB,
        fullest=max(needed_gib(memory, gpu) for memory in memories),
        step_seconds=None if time is None else time.seconds,
        error_percent=None if time is None else time.error_percent,
        modules=first.modules,
    )
