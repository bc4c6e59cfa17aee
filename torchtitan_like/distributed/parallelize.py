"""Apply all parallelisms: float8 -> TP -> CP -> activation checkpointing -> compile -> data parallel.

This order is written only here. Models have no parallelize functions: their differences are data in
`ModelSpec`. `parallelize` calls one function for each parallelism.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_like.config.sections_scale import GRAPH_BACKENDS
from torchtitan_like.distributed.activation_offload import ActivationOffload
from torchtitan_like.distributed.data_parallel import DTYPES, needs_wrapping
from torchtitan_like.distributed.float8 import FLOAT8, convert_to_float8
from torchtitan_like.distributed.initialize import materialize
from torchtitan_like.distributed.views import on_local_parameters
from torchtitan_like.distributed.world import HostGroup, World
from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.extensions.user_code import convert
from torchtitan_like.util.compile import compile_function
from torchtitan_like.util.modules import is_dotted

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import (
        ActivationCheckpoint,
        Compile,
        Float8Linear,
        Parallelism,
    )
    from torchtitan_like.config.sections_training import Training
    from torchtitan_like.distributed.context_parallel import ContextParallel
    from torchtitan_like.distributed.pipeline import Pipeline
    from torchtitan_like.distributed.row_exchange import RowExchange
    from torchtitan_like.distributed.stages import StagePlan
    from torchtitan_like.models.spec import ModelSpec


logger = logging.getLogger()


@dataclass(frozen=True)
class Sections:
    """The config sections that determine how a model is parallelized.

    settings: the config sections of user code. stage_plan: None without a pipeline.
    """

    training: Training
    parallelism: Parallelism
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    converters: Sequence[str]
    float8: Float8Linear
    print_after_conversion: bool = False
    settings: Settings = field(default_factory=dict)
    stage_plan: StagePlan | None = None

    @property
    def needs_fsdp2(self) -> bool:
        """True if a single rank must use FSDP2 instead of plain casts."""
        return self.training.enable_cpu_offload or self.activation_checkpoint.mode == "offload"

    @property
    def loss_backend(self) -> str | None:
        """Backend that compiles the loss; None if it is not compiled."""
        return (
            self.compile.backend
            if self.compile.enable and "loss" in self.compile.components
            else None
        )


def find_blocks(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by fqn, in order."""
    depth = spec.block_pattern.count(".")
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if fnmatch(fqn, spec.block_pattern) and fqn.count(".") == depth
    }


class ShardedModel(NamedTuple):
    """This rank's model parts and the objects that run them.

    parts: the whole model, or this rank's pipeline stages.
    pipeline: runs the stages; None without pipeline parallelism.
    context: shards sequences; None without context parallelism.
    offload: offloads activations; None if they stay on the device.
    exchange: sends rows to the ranks of their experts.
    lines: lines for the log.
    """

    parts: nn.ModuleList
    pipeline: Pipeline | None
    context: ContextParallel | None
    offload: ActivationOffload | None
    exchange: RowExchange
    lines: list[str]

    def finish_warmup(self, group: HostGroup) -> None:
        """Log the host memory that offloading took in the first step. A collective of `group`.

        The steps that follow do not check whether memory is available.
        """
        if self.offload is not None:
            self.offload.checks_memory = False
            logger.info(self.offload.describe_peak(group))


def build_parts(
    spec: ModelSpec,
    args: Any,
    world: World,
    sections: Sections,
    exchange: RowExchange,
    *,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]],
    num_samples: int,
) -> ShardedModel:
    """Build the model or this rank's pipeline stages, sharded over the mesh, without values.

    loss: the head's loss function, see `OutputHead`.
    num_samples: samples that a data-parallel rank reads in a step.
    """
    training, lines = sections.training, []
    context = build_context_parallel(world, sections.parallelism)
    whole = _on_meta(spec, args, training)
    pipeline = _build_pipeline(spec, args, world, sections, whole) if world.dims.pp > 1 else None
    parts: list[Any] = [whole] if pipeline is None else pipeline.parts
    offload = None
    if sections.activation_checkpoint.mode == "offload":
        offload = ActivationOffload(int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    converters = [name for name in sections.converters if is_dotted(name)]
    for part in parts:
        for name in converters:
            convert(name, part, sections.settings)
            lines.append(f"Applied the converter {name}")
        if converters and sections.print_after_conversion:
            lines.append(f"Model definition after conversion:\n\n{part}\n\n")
        head: Any = dict(part.named_modules()).get(spec.last_modules[-1])
        if head is not None:
            head.loss = loss
        lines += parallelize(part, spec, world, sections, exchange, context, offload)
        with world.allocating():
            materialize(part, torch.device("cpu") if training.enable_cpu_offload else world.device)
            if training.enable_cpu_offload:
                part.init_buffers(world.device)  # only parameters are on the host
        exchange.connect(part)
    if pipeline is not None:
        with world.allocating():
            pipeline.connect()
    if pipeline is not None:
        lines += pipeline.lines(
            num_samples // sections.parallelism.pipeline_parallel_microbatch_size
        )
    return ShardedModel(
        nn.ModuleList(parts), pipeline, context, offload, exchange, list(dict.fromkeys(lines))
    )


def _on_meta(spec: ModelSpec, args: Any, training: Training) -> Any:
    with torch.device("meta"):
        return spec.build(args).to(DTYPES[training.dtype])


def _build_pipeline(
    spec: ModelSpec, args: Any, world: World, sections: Sections, whole: nn.Module
) -> Pipeline:
    """Build this rank's stages on meta: each is the model without the modules of other stages."""
    from torchtitan_like.distributed import pipeline, stages

    section, training, plan = sections.parallelism, sections.training, sections.stage_plan
    assert plan is not None and not plan.problems, plan  # `check` has reported these
    own = [plan.fqns[stage] for stage in plan.ranks[world.coordinate("pp")]]
    return pipeline.Pipeline(
        [stages.prune(_on_meta(spec, args, training), spec, fqns) for fqns in own],
        plan,
        world.group("pp"),
        neighbor_groups=world.neighbor_groups,
        device=world.device,
        microbatch_size=section.pipeline_parallel_microbatch_size,
        width=pipeline.hidden_width(whole, spec),
        dtype=DTYPES[training.mixed_precision_param],
        stage_tensors=spec.stage_tensors(args),
        sequence_shards=world.dims.tp if section.enable_sequence_parallel else 1,
    )


def build_context_parallel(world: World, parallelism: Parallelism) -> ContextParallel | None:
    """Return the `ContextParallel` of this rank; None without context parallelism."""
    if world.dims.cp == 1:
        return None
    from torchtitan_like.distributed.context_parallel import ContextParallel

    method = {"alltoall": "ring"}.get(parallelism.context_parallel_rotate_method)
    return ContextParallel(
        world.group("cp"),
        world.coordinate("cp"),
        world.dims.cp,
        method or parallelism.context_parallel_rotate_method,
        parallelism.context_parallel_load_balancer,
    )


def parallelize(
    model: nn.Module,
    spec: ModelSpec,
    world: World,
    sections: Sections,
    exchange: RowExchange,
    context: ContextParallel | None = None,
    activation_offload: ActivationOffload | None = None,
) -> list[str]:
    """Apply every configured parallelism to a model on `meta`, in place; return lines for the log."""
    lines: list[str] = []
    dims, training, parallelism = world.dims, sections.training, sections.parallelism
    num_shards, compiled = dims.dp_shard * dims.cp, sections.compile.compiles_model
    if FLOAT8 in sections.converters:
        lines += convert_to_float8(
            model, sections.float8, num_shards=num_shards, tp=dims.tp, compiled=compiled
        )
        if sections.print_after_conversion:
            lines.append(f"Model definition after conversion:\n\n{model}\n\n")
    options: dict[str, Any] = {}
    if world.experts_mesh is not None:
        from torchtitan_like.distributed.expert_parallel import EXPERTS_DIMS, apply_expert_parallel

        names = world.experts_mesh.mesh_dim_names or ()
        mesh = world.experts_mesh[tuple(name for name in EXPERTS_DIMS if name in names)]
        lines += apply_expert_parallel(model, spec, mesh, exchange)
    if dims.tp > 1:
        from torchtitan_like.distributed.tensor_parallel import (
            apply_tensor_parallel,
            overlap_tensor_parallel,
        )

        assert world.mesh is not None
        lines += apply_tensor_parallel(
            model, spec, world.mesh["tp"], sequence_parallel=parallelism.enable_sequence_parallel
        )
        if parallelism.enable_async_tensor_parallel:
            options = overlap_tensor_parallel(world.group("tp"))
            lines.append(
                "Async Tensor Parallelism: matrix products overlap with adjacent collectives"
            )
    if context is not None:
        from torchtitan_like.distributed.context_parallel import apply_context_parallel

        lines += apply_context_parallel(model, context)
    shares_samples = dims.tp > 1 and parallelism.enable_sequence_parallel
    if context is not None or shares_samples:
        from torchtitan_like.distributed.sequence import shard_routed_sequences

        shard_routed_sequences(model, context, world.group("tp") if shares_samples else None)
    blocks = find_blocks(model, spec)
    if activation_offload is not None:
        lines.append(activation_offload.apply(blocks.values()))
    elif sections.activation_checkpoint.mode != "none":
        from torchtitan_like.distributed.activation import apply_activation_checkpointing

        plan = sections.stage_plan
        splits_backward = plan is not None and plan.splits_backward
        lines.append(
            apply_activation_checkpointing(
                blocks,
                sections.activation_checkpoint,
                keeps_row_counts=dims.ep > 1 and not splits_backward,
            )
        )
    simple = parallelism.data_parallel_impl == "simple_fsdp"
    if compiled:
        backend = sections.compile.backend
        if simple:
            from torchtitan_like.distributed.simple_fsdp import compile_model

            is_bucketed = parallelism.simple_fsdp_bucketing and backend in GRAPH_BACKENDS
            buckets = blocks if is_bucketed else ()
            compile_model(model, backend, world.mesh, buckets, options=options)
        else:
            compile_blocks(blocks, backend, options, exchanges_rows=dims.ep > 1)
        unit = "the whole model" if simple else "each block"
        lines.append(f"Compiling {unit} with torch.compile ({backend})")
    offload = training.enable_cpu_offload
    if not needs_wrapping(dims, training.dtype, training.mixed_precision_param, offload):
        return lines
    options_of_weights: dict[str, Any] = {
        "param_dtype": training.mixed_precision_param,
        "reduce_dtype": training.mixed_precision_reduce,
        "reshard": parallelism.fsdp_reshard_after_forward,
    }
    # A single data-parallel rank gathers nothing: it only casts each weight where it is read. FSDP2
    # is needed for pipelines, which cast once for all micro-batches, for experts on a mesh of their
    # own, and for offloading.
    casts_only = (
        dims.dp * dims.cp == 1
        and dims.pp == 1
        and not dims.has_experts_mesh
        and not sections.needs_fsdp2
    )
    if casts_only:
        from torchtitan_like.distributed.simple_fsdp import cast_weights

        cast_weights(
            model,
            spec,
            blocks.values(),
            world.mesh,
            dims,
            **options_of_weights,
            compiled=compiled,
        )
        handler = "a cast of each weight"
    elif simple:
        from torchtitan_like.distributed.simple_fsdp import apply_simple_fsdp

        assert world.mesh is not None
        name = apply_simple_fsdp(
            model,
            spec,
            blocks.values(),
            world.mesh,
            dims,
            **options_of_weights,
            compiled=compiled,
        )
        lines.append(f"Applied {name} to the model")
        handler = "simple_fsdp"
    else:
        from torchtitan_like.distributed.data_parallel import apply_data_parallel

        assert world.mesh is not None
        name = apply_data_parallel(
            model,
            spec,
            blocks.values(),
            world.mesh,
            dims,
            **options_of_weights,
            cpu_offload=offload,
            prefetch_depth=parallelism.fsdp_prefetch_depth,
            experts_mesh=world.experts_mesh,
        )
        lines.append(f"Applied {name} to the model")
        handler = "fully_shard"
    lines.append(
        f"Mixed precision training is handled by {handler}: parameters "
        f"{training.dtype}, compute {training.mixed_precision_param}, reduction {training.mixed_precision_reduce}"
    )
    if offload:
        lines.append("Applied CPU offloading to the model")
    return lines


def compile_blocks(
    blocks: dict[str, nn.Module],
    backend: str,
    options: dict[str, Any] | None = None,
    *,
    exchanges_rows: bool = False,
) -> None:
    """Compile each block's forward as one graph; equal blocks share one compilation.

    Parameter names do not change. options: options of the backend. exchanges_rows: see
    `expert_parallel`. Graphs of the exact exchange contain sizes that are known only when they run;
    those of the bounded one are compiled again when its capacity, a float, changes.
    """
    if exchanges_rows:
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.specialize_float = True
    for block in blocks.values():
        forward = compile_function(
            block.forward, backend=backend, options=options or None, fullgraph=True
        )
        block.forward = on_local_parameters(block, forward)
