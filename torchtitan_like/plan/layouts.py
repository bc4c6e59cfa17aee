"""Layouts of the ranks around a configuration: every one that `titan plan search` considers.

A layout keeps the model, the sequence length and the samples of a step. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from torchtitan_like.config import JobConfig
from torchtitan_like.distributed.float8 import FLOAT8
from torchtitan_like.distributed.stages import SCHEDULES

LONG_SEQ_LEN = 32768  # from which context parallelism is tried
MAX_CONTEXT_RANKS = 16
MICRO_BATCHES = (1, 2, 4, 8, 16)  # samples of one forward pass
MAX_STAGES_PER_RANK = 8

Recompute = Literal["none", "op", "every n", "full", "as given"]


class Pipeline(NamedTuple):
    """How the stages of a pipeline run. stages_per_rank: 1, or more for schedules that interleave."""

    schedule: str
    stages_per_rank: int


# GPipe and LoopedBFS are left out: 1F1B and Interleaved1F1B take as long and need less memory.
PIPELINES = (
    Pipeline("1F1B", 1),
    *(Pipeline("Interleaved1F1B", number) for number in (2, 4, MAX_STAGES_PER_RANK)),
    Pipeline("InterleavedZeroBubble", 2),
    Pipeline("ZBVZeroBubble", 2),
    Pipeline("DualPipeV", 2),
)


@dataclass(frozen=True)
class Layout:
    """One layout of the ranks.

    ep, expert_tp: `expert_parallel_degree` and `expert_tensor_parallel_degree`, which use ranks of
    the other degrees. pipeline: None without one.
    micro_batch: samples of one forward pass. num_micro: forward passes of a step.
    recompute: what backward computes again. frees_weights: gathered weights are freed after forward.
    compiles, float8, async_tp: what the given configuration lacks: compiled blocks, float8 products,
    and tensor-parallel communication behind products.
    """

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    ep: int
    expert_tp: int
    pipeline: Pipeline | None
    micro_batch: int
    num_micro: int
    recompute: Recompute
    frees_weights: bool
    compiles: bool = False
    float8: bool = False
    async_tp: bool = False

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def num_stages(self) -> int:
        return self.pp * (self.pipeline.stages_per_rank if self.pipeline else 1)

    @property
    def name(self) -> str:
        """The degrees as users write them, such as `TP 8 x FSDP 32`."""
        degrees = (("PP", self.pp), ("CP", self.cp), ("TP", self.tp))
        kinds = [f"{kind} {degree}" for kind, degree in degrees if degree > 1]
        if self.replicate > 1 and self.shard > 1:
            kinds.append(f"HSDP {self.replicate} x {self.shard}")
        elif self.dp > 1:
            kinds.append(f"FSDP {self.shard}" if self.shard > 1 else f"DDP {self.replicate}")
        borrowed = (("EP", self.ep), ("ETP", self.expert_tp))
        kinds += [f"{kind} {degree}" for kind, degree in borrowed if degree > 1]
        return " x ".join(kinds) or "one GPU"

    @property
    def num_kinds(self) -> int:
        """Kinds of parallelism besides data parallelism: how complicated the layout is."""
        return sum(degree > 1 for degree in (self.pp, self.cp, self.tp, self.ep))

    @property
    def num_expert_ranks(self) -> int:
        """Ranks over which experts are distributed or sharded, whole or in parts of `expert_tp`."""
        return self.shard * self.cp * self.tp // self.expert_tp

    @property
    def details(self) -> str:
        """What the name leaves out: schedule, recomputation, resharding, and kinds of kernels."""
        parts = []
        if self.pipeline is not None:
            number = self.pipeline.stages_per_rank
            parts.append(self.pipeline.schedule + (f" x {number}" if number > 1 else ""))
        parts.append(f"AC {self.recompute}")
        if self.shard * self.cp > 1 and self.frees_weights != (self.pp == 1):
            parts.append("reshard" if self.frees_weights else "no reshard")
        kinds = (("compiled", self.compiles), ("float8", self.float8), ("async TP", self.async_tp))
        parts += [name for name, is_used in kinds if is_used]
        return ", ".join(parts)


@dataclass(frozen=True)
class Space:
    """What bounds the layouts.

    config: the given configuration. ranks_per_node: the most tensor-parallel ranks.
    global_batch: samples of a step. num_layers, num_experts: of the model, 0 experts if it is dense.
    """

    config: JobConfig
    world_size: int
    ranks_per_node: int
    global_batch: int
    num_layers: int
    num_experts: int

    @property
    def num_slots(self) -> int:
        """Layers, and what the first and the last modules count in the division into stages."""
        section = self.config.parallelism
        return (
            self.num_layers
            + section.pipeline_parallel_first_stage_less_layers
            + section.pipeline_parallel_last_stage_less_layers
        )


# ---- enumeration


def meshes(space: Space) -> Iterator[Layout]:
    """Yield every division of the ranks with each pipeline schedule, and one micro-batch size.

    No rule has checked them. Recomputation and resharding are those of the configuration.
    """
    section = space.config.parallelism
    is_long = space.config.training.seq_len >= LONG_SEQ_LEN
    contexts = {1, section.context_parallel_degree}
    contexts |= {n for n in (2, 4, 8, MAX_CONTEXT_RANKS) if is_long}
    stages = [n for n in divisors(space.world_size) if n <= space.num_slots]
    tensors = [n for n in divisors(space.world_size) if n <= space.ranks_per_node]
    for pp, tp, cp in product(stages, tensors, sorted(contexts)):
        dp, remainder = divmod(space.world_size, pp * tp * cp)
        if remainder or not dp:
            continue
        expert_tps = sorted({1, tp}) if space.num_experts else [1]
        pipelines = [one for one in PIPELINES if _can_split(space, pp, one)] if pp > 1 else [None]
        for shard, expert_tp, pipeline in product(divisors(dp), expert_tps, pipelines):
            rows = space.global_batch // dp
            layout = Layout(
                pp=pp,
                replicate=dp // shard,
                shard=shard,
                cp=cp,
                tp=tp,
                ep=1,
                expert_tp=expert_tp,
                pipeline=pipeline,
                micro_batch=1,
                num_micro=max(1, rows),
                recompute="as given",
                frees_weights=frees_weights(space.config, pp),
            )
            # Every degree that divides the experts and their ranks; 1 alone for a dense model.
            degrees = divisors(math.gcd(space.num_experts, layout.num_expert_ranks))
            for ep in degrees if space.num_experts else [1]:
                yield replace(layout, ep=ep)


def variants(space: Space, mesh: Layout) -> Iterator[Layout]:
    """Yield a mesh with every micro-batch size, recomputation and policy of resharding."""
    rows = space.global_batch // mesh.dp
    sizes = [size for size in MICRO_BATCHES if rows % size == 0]
    policies = (True, False) if mesh.shard * mesh.cp > 1 else (mesh.frees_weights,)
    for size, recompute, frees in product(sizes, recomputations(space.config), policies):
        yield replace(
            mesh,
            micro_batch=size,
            num_micro=rows // size,
            recompute=recompute,
            frees_weights=frees,
        )


def with_faster_kernels(layout: Layout, config: JobConfig) -> Iterator[Layout]:
    """Yield a layout; then compiled; then with asynchronous tensor parallelism, which needs that.

    Their dry runs are the same.
    """
    yield layout
    if not config.compile.compiles_model and not layout.compiles:
        layout = replace(layout, compiles=True)
        yield layout
    if layout.tp > 1 and not config.parallelism.enable_async_tensor_parallel:
        yield replace(layout, async_tp=True)


def with_float8(layout: Layout, config: JobConfig) -> Layout | None:
    """Return a layout with compiled float8 products; None if the configuration has float8 already."""
    if FLOAT8 in config.model.converters:
        return None
    compiles = not config.compile.compiles_model
    return replace(layout, compiles=compiles, float8=True, async_tp=False)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def recomputations(config: JobConfig) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation to try; one that only the configuration has is first."""
    common: tuple[Recompute, ...] = ("none", "op", "full")
    given = recompute_of(config)
    return common if given in common else (given, *common)


def recompute_of(config: JobConfig) -> Recompute:
    """Return the recomputation of a configuration. memory_budget and offload: "as given"."""
    section = config.activation_checkpoint
    if section.mode == "selective":
        return "op" if section.selective_ac_option == "op" else "every n"
    return section.mode if section.mode in ("none", "full") else "as given"


def frees_weights(config: JobConfig, pp: int) -> bool:
    """Return whether FSDP frees gathered weights after forward with this many pipeline ranks."""
    policy = config.parallelism.fsdp_reshard_after_forward
    return policy == "always" or (policy == "default" and pp == 1)


def _can_split(space: Space, pp: int, pipeline: Pipeline) -> bool:
    """Return True if every stage has a layer's worth of modules and settings can express it."""
    num_stages = pp * pipeline.stages_per_rank
    if num_stages > space.num_slots:
        return False
    is_default = pipeline.stages_per_rank == (2 if SCHEDULES[pipeline.schedule].is_multi else 1)
    per_stage = math.ceil(space.num_slots / num_stages)
    return is_default or math.ceil(space.num_slots / per_stage) == num_stages


# ---- settings


GLOBAL_BATCH = "training.global_batch_size"
_RECOMPUTE_MODE: dict[Recompute, str] = {"none": "none", "op": "selective", "full": "full"}
# What a layout sets, by dotted key. None: the layout leaves the setting as it is.
# A data_parallel_shard_degree of -1 is all remaining ranks, as each layout uses.
SETTINGS: dict[str, Callable[[Layout, Space], Any]] = {
    "training.local_batch_size": lambda layout, space: layout.micro_batch,
    GLOBAL_BATCH: lambda layout, space: space.global_batch,
    "parallelism.data_parallel_replicate_degree": lambda layout, space: layout.replicate,
    "parallelism.data_parallel_shard_degree": (
        lambda layout, space: (
            -1 if space.config.parallelism.data_parallel_shard_degree == -1 else layout.shard
        )
    ),
    "parallelism.fsdp_reshard_after_forward": lambda layout, space: _reshard(layout, space.config),
    "parallelism.tensor_parallel_degree": lambda layout, space: layout.tp,
    "parallelism.context_parallel_degree": lambda layout, space: layout.cp,
    "parallelism.expert_parallel_degree": lambda layout, space: layout.ep,
    "parallelism.expert_tensor_parallel_degree": lambda layout, space: layout.expert_tp,
    "parallelism.pipeline_parallel_degree": lambda layout, space: layout.pp,
    "parallelism.pipeline_parallel_schedule": (
        lambda layout, space: layout.pipeline.schedule if layout.pipeline else None
    ),
    "parallelism.pipeline_parallel_layers_per_stage": lambda layout, space: _per_stage(
        layout, space
    ),
    "parallelism.pipeline_parallel_microbatch_size": (
        lambda layout, space: layout.micro_batch if layout.pipeline else None
    ),
    "activation_checkpoint.mode": lambda layout, space: _RECOMPUTE_MODE.get(layout.recompute),
    "activation_checkpoint.selective_ac_option": (
        lambda layout, space: "op" if layout.recompute == "op" else None
    ),
    "compile.enable": lambda layout, space: layout.compiles or None,
    "model.converters": lambda layout, space: (
        [*space.config.model.converters, FLOAT8] if layout.float8 else None
    ),
    "parallelism.enable_async_tensor_parallel": lambda layout, space: layout.async_tp or None,
}


def _reshard(layout: Layout, config: JobConfig) -> str | None:
    if layout.frees_weights == frees_weights(config, layout.pp):
        return None
    return "always" if layout.frees_weights else "never"


def _per_stage(layout: Layout, space: Space) -> int | None:
    """Return the layers of a stage; None if that is the default for the schedule."""
    if layout.pipeline is None:
        return None
    is_multi = SCHEDULES[layout.pipeline.schedule].is_multi
    given = space.config.parallelism.pipeline_parallel_layers_per_stage
    if given is None and layout.pipeline.stages_per_rank == (2 if is_multi else 1):
        return None
    return math.ceil(space.num_slots / layout.num_stages)


def settings_of(layout: Layout, space: Space) -> dict[str, Any]:
    """Return the settings by which a layout differs from the given configuration."""
    values = {key: value(layout, space) for key, value in SETTINGS.items()}
    return {
        key: value
        for key, value in values.items()
        if value is not None and value != space.config.value_of(key)
    }


def apply(layout: Layout, space: Space) -> JobConfig:
    """Return the configuration with a layout."""
    return with_settings(space.config, settings_of(layout, space))


def with_settings(config: JobConfig, settings: dict[str, Any]) -> JobConfig:
    """Return a copy of a configuration with other values of dotted keys, which are not checked."""
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        by_section.setdefault(section, {})[name] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in by_section.items()
        }
    )


def keeps_given_settings(layout: Layout, space: Space) -> bool:
    """Return True if the layout changes no setting that the command line gives."""
    changed = settings_of(layout, space).keys() - {GLOBAL_BATCH}
    return not any(space.config.origin_of(key) == "command line" for key in changed)
