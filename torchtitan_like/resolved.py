"""`Run`: what a start resolves once from its checked configuration. Without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchtitan_like.check.context import BatchGeometry, RunContext, build_context
from torchtitan_like.check.model_checks import check_model
from torchtitan_like.config import dump_toml
from torchtitan_like.config.layers import by_key
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.models.spec import ModelSpec, describe_size
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.run_directory import log_file

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.checkpointer import Checkpointer
    from torchtitan_like.checkpoint.origin import Origin
    from torchtitan_like.config import JobConfig
    from torchtitan_like.distributed.stages import StagePlan
    from torchtitan_like.distributed.world import World
    from torchtitan_like.monitor.attempt import Attempt
    from torchtitan_like.monitor.garbage import GarbageCollection
    from torchtitan_like.monitor.start_clock import StartClock
    from torchtitan_like.resilience.agreement import Requests
    from torchtitan_like.resilience.heartbeat import Heartbeat, RankPosition


logger = logging.getLogger()


@dataclass(frozen=True)
class Run:
    """A checked configuration with its model and its layout.

    spec, args: the model and its sizes. dims: the sizes of the mesh. geometry: samples of a step.
    stage_plan: None without a pipeline.
    """

    config: JobConfig
    spec: ModelSpec
    args: Any
    dims: ParallelDims
    geometry: BatchGeometry
    stage_plan: StagePlan | None

    @property
    def max_seq_len(self) -> int:
        """The largest sequence length that the model computes, in training and validation."""
        training, validation = self.config.training, self.config.validation
        return max(training.seq_len, validation.seq_len if validation.enable else 0)

    @cached_property
    def config_toml(self) -> str:
        """The configuration as checkpoints and the run directory store it, with secrets masked."""
        return dump_toml(self.config)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The configuration as nested tables."""
        return self.config.model_dump()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key."""
        return by_key(self.tables)

    @property
    def flops_per_token(self) -> float:
        return self.spec.flops_per_token(self.args, self.config.training.seq_len)


@dataclass(frozen=True)
class RankRun(Run):
    """A run with what one of its ranks has from the start of the process to its end.

    requests: of signals and files, to save or stop. position: where the rank is, for reports of
    errors and hangs. clock: reports how long the start takes. attempt: the files of this start.
    origin: what the run starts from. seed: of all randomness.
    """

    world: World
    checkpointer: Checkpointer
    requests: Requests
    position: RankPosition
    clock: StartClock
    garbage: GarbageCollection
    attempt: Attempt
    heartbeat: Heartbeat
    origin: Origin
    seed: int


def log_sizes(run: RankRun, names: Sequence[str], first_step: int, warmup_steps: int) -> None:
    """Log the sizes of a step. A terminal shows six facts about the run instead.

    names: of the training data, where it has several sources.
    """
    training, geometry = run.config.training, run.geometry
    num_tokens = geometry.global_batch_size * training.seq_len
    data = ", ".join(names) or str(training.dataset_path or training.dataset)
    logger.info(
        f"Trainer is initialized with local batch size {training.local_batch_size}, "
        f"global batch size {geometry.global_batch_size} "
        f"(= local x data parallel {geometry.num_data_ranks} x accumulation), "
        f"gradient accumulation steps {geometry.num_accumulated}, "
        f"sequence length {training.seq_len} ({num_tokens:,} tokens per step), "
        f"total steps {training.steps} (warmup {warmup_steps})",
        extra=on_screen(_facts_of(run, data, first_step)),
    )


def _facts_of(run: RankRun, data: str, first_step: int) -> str:
    """Return six facts about a run, as the lines of one text for a terminal.

    data: names of the training data.
    """
    config, training, geometry = run.config, run.config.training, run.geometry
    layout = ", ".join(f"{name} {size}" for name, size in run.dims.layout().items())
    num_tokens = geometry.global_batch_size * training.seq_len
    save = config.checkpoint
    saved = f"a checkpoint every {save.interval}" if save.enable else "no checkpoints"
    size = describe_size(run.spec, run.args)
    facts = {
        "model": f"{config.model.name} {config.model.flavor}, {size}",
        "layout": f"{run.world.size} x {run.world.device.type}: {layout}",
        "data": data,
        "batch": f"{geometry.global_batch_size} x {training.seq_len:,} = {num_tokens:,} tokens",
        "steps": f"{first_step:,} to {training.steps:,}, {saved}",
        "log": str(log_file(run.attempt.folder, run.world.rank)),
    }
    return "\n         ".join(f"{name:<6}  {fact}" for name, fact in facts.items())


def resolve_layout(config: JobConfig, world_size: int) -> Run:
    """Resolve another layout of a configuration that `check` has accepted."""
    return resolve(build_context(config, world_size, check_model(config)))


def resolve(checked: RunContext) -> Run:
    """Return the run of a configuration that `check` has accepted for a number of ranks."""
    assert checked.spec is not None and checked.is_resolved, checked.degree_errors
    return Run(**{field.name: getattr(checked, field.name) for field in fields(Run)})
