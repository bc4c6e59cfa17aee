"""The one place that writes the order: TP/EP -> CP -> activation checkpointing -> compile -> data parallel.

No model has a function of its own like this one: what differs between models is data in its `ModelSpec`.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan_like.distributed.world import World

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import ActivationCheckpoint, Compile, Parallelism
    from torchtitan_like.config.sections_training import Training
    from torchtitan_like.models.spec import ModelSpec


def find_blocks(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    """The repeated blocks of a model by fqn, in order."""
    depth = spec.block_pattern.count(".")
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if fnmatch(fqn, spec.block_pattern) and fqn.count(".") == depth
    }


def parallelize(
    model: nn.Module,
    spec: ModelSpec,
    world: World,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile_section: Compile,
) -> list[str]:
    """Apply to a model on `meta` all that `World` and the config ask for, in place; returns lines for the log."""
    lines = []
    compiled = compile_section.enable and "model" in compile_section.components
    blocks = find_blocks(model, spec)
    if activation_checkpoint.mode != "none":
        from torchtitan_like.distributed.activation import apply_activation_checkpointing

        lines.append(apply_activation_checkpointing(blocks, activation_checkpoint, compiled=compiled))
    if compiled:
        compile_blocks(blocks, compile_section.backend)
        lines.append(f"Compiling each block with torch.compile ({compile_section.backend})")
    if world.mesh is not None:
        from torchtitan_like.distributed.data_parallel import apply_data_parallel

        name = apply_data_parallel(
            model,
            spec,
            blocks.values(),
            world.mesh,
            world.dims,
            param_dtype=training.mixed_precision_param,
            reduce_dtype=training.mixed_precision_reduce,
            reshard=parallelism.fsdp_reshard_after_forward,
            cpu_offload=training.enable_cpu_offload,
        )
        lines.append(f"Applied {name} to the model")
        lines.append(
            f"Mixed precision training is handled by fully_shard: parameters {training.dtype}, compute "
            f"{training.mixed_precision_param}, reduction {training.mixed_precision_reduce}"
        )
        if training.enable_cpu_offload:
            lines.append("Applied CPU offloading to the model")
    return lines


def compile_blocks(blocks: dict[str, nn.Module], backend: str) -> None:
    """Compile each block's forward, whole; blocks of one shape share one compilation. Names do not change."""
    for block in blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
