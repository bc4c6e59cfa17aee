"""Activation checkpointing, applied to a block by replacing its `forward`.

Wrapping the module instead would change the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import ActivationCheckpoint

# Outputs that the per-op policy saves: the most expensive ones to recompute.
SAVED_OPS = (
    "mm.default",
    "addmm.default",
    "_grouped_mm.default",
    "torchtitan_like.rows_times_groups.default",
    "torchtitan_like.copy_to_host.default",
    "_c10d_functional.all_to_all_single.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
)
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"


def apply_activation_checkpointing(
    blocks: dict[str, nn.Module], section: ActivationCheckpoint, *, keeps_row_counts: bool = False
) -> str:
    """Apply `[activation_checkpoint]` to the blocks (fqn -> module) in place; return a log line.

    Results do not change: an activation is recomputed by the same operations from the same inputs.
    A memory budget affects compiled blocks only. keeps_row_counts: recomputation reuses the numbers
    of rows that expert-parallel ranks have exchanged. They can be read only once, so a schedule that
    splits backward passes exchanges them again.
    """
    if section.mode == "none":
        return ""
    if section.mode == "memory_budget":
        return _set_memory_budget(section)
    every = 1
    contexts: Callable[[], Any] | None = None
    if keeps_row_counts:
        contexts = partial(create_selective_checkpoint_contexts, _save_row_counts)
    if section.mode == "selective" and section.selective_ac_option == "op":
        recomputed = _mm_shapes(blocks, section.per_op_sac_force_recompute_mm_shapes_by_fqns)
        saved = (
            (*SAVED_OPS, REDUCE_SCATTER) if section.per_op_sac_save_reduce_scatter else SAVED_OPS
        )
        contexts = partial(_per_op_contexts, saved, recomputed)
    elif section.mode == "selective":
        every = int(section.selective_ac_option)
    for index, block in enumerate(blocks.values()):
        if index % every == 0:
            _checkpoint_forward(block, section, contexts)
    return f"Applied {section.mode} activation checkpointing to the model"


def _checkpoint_forward(
    block: nn.Module, section: ActivationCheckpoint, contexts: Callable[[], Any] | None
) -> None:
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": section.preserve_rng_state,
        "determinism_check": section.determinism_check,
        "debug": section.debug,
        "early_stop": section.early_stop,
    }
    if contexts is not None:
        options["context_fn"] = contexts
        if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:  # torch 2.14
            # Hooks of simple_fsdp replace gathered weights, and the policy saves none of these.
            options["respect_saved_tensors_hooks"] = False
    forward = block.forward

    def checkpointed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, **options)

    block.forward = checkpointed


def _per_op_contexts(saved_ops: tuple[str, ...], recomputed_shapes: set[tuple[int, ...]]) -> Any:
    """Return the contexts of one pass through one block; its policy counts that pass's products."""
    return create_selective_checkpoint_contexts(_PerOpPolicy(saved_ops, recomputed_shapes))


def _save_row_counts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save only the numbers of rows that expert-parallel ranks send, on the device and the host."""
    name = str(op)
    is_exchange = name == "_c10d_functional.all_to_all_single.default"
    if name == "torchtitan_like.copy_to_host.default" or (
        is_exchange and not args[0].is_floating_point()
    ):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _PerOpPolicy:
    """Saves the outputs of `saved_ops`, except every second matrix product and listed weight shapes.

    Recomputing half of the matrix products saves half of their memory; which half matters little.
    """

    def __init__(self, saved_ops: tuple[str, ...], recomputed_shapes: set[tuple[int, ...]]) -> None:
        self._saved_ops = saved_ops
        self._recomputed_shapes = recomputed_shapes
        # Counted separately in forward and recomputation, so that they decide equally.
        self._num_products = {False: 0, True: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).removeprefix("aten.")
        if name not in self._saved_ops:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name.startswith(("mm", "addmm")):
            weight = args[-1]
            if tuple(weight.shape) in self._recomputed_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            self._num_products[ctx.is_recompute] += 1
            if self._num_products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _mm_shapes(blocks: dict[str, nn.Module], fqns: list[str]) -> set[tuple[int, ...]]:
    """Return `mm`'s shapes (in, out) of the linear weights whose name contains one of `fqns`."""
    return {
        (module.in_features, module.out_features)
        for fqn, block in blocks.items()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and any(f in f"{fqn}.{name}" for f in fqns)
    }


def _set_memory_budget(section: ActivationCheckpoint) -> str:
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = section.memory_budget
    functorch_config.visualize_memory_budget_pareto = section.visualize_memory_budget_pareto
    return f"Activation memory budget is {section.memory_budget}"
