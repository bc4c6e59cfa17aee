"""Data parallelism with FSDP2: `fully_shard` (FSDP, HSDP) and `replicate` (DDP).

Gradients are *summed* over data-parallel ranks. The loss is already divided by the global number of
valid tokens, so a mean would make the update depend on the topology. Parameters are cast once per
gather, and gradients are reduced in `mixed_precision_reduce`. A single rank gathers nothing: it
uses the casts of `simple_fsdp`, with the same numbers and without importing DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torchtitan_like.distributed.dims import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.models.spec import ModelSpec

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def needs_wrapping(
    dims: ParallelDims, dtype: str, mixed_precision_param: str, cpu_offload: bool
) -> bool:
    """Return False if one data-parallel rank holds the whole model in the compute dtype."""
    return (
        dims.dp * dims.cp > 1
        or dims.has_experts_mesh
        or dtype != mixed_precision_param
        or cpu_offload
    )


def apply_data_parallel(
    model: nn.Module,
    spec: ModelSpec,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    dims: ParallelDims,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard: Literal["always", "default", "never"],
    cpu_offload: bool,
    prefetch_depth: int = 1,
    experts_mesh: DeviceMesh | None = None,
) -> str:
    """Shard or replicate `model` in place: one group per block, one for the head, one for the rest.

    experts_mesh: mesh of the experts, which are then a second group of a block's FSDP module; None
        if they are sharded like the other weights.
    reshard: "always" frees gathered weights after every forward. "default" keeps the weights
        of the head and of the outermost group, which backward needs first; with pipelines it keeps all, since
        each micro-batch would gather them again. "never" keeps all.
    prefetch_depth: number of blocks gathered ahead of the one that computes; FSDP2's default is 1.

    Returns the name of the method ("FSDP", "HSDP", "DDP"), for the log.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    stored = next(model.parameters()).dtype
    computed, reduced = DTYPES[param_dtype], DTYPES[reduce_dtype]
    policy: dict[str, Any] = {
        # Activations keep the dtype that the model gives them, as in an unwrapped model.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if computed == stored else computed,
            reduce_dtype=None if reduced == computed else reduced,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    if dims.dp_replicate > 1 and dims.dp_shard * dims.cp == 1:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        name, dp_mesh = "DDP", mesh["dp_replicate"]

        def wrap(module: Any, reshard_after: bool) -> None:
            replicate(
                module, mesh=dp_mesh, **policy
            )  # nothing is gathered, so nothing is resharded

    else:
        hybrid = dims.dp_replicate > 1
        name, dp_mesh = (
            ("HSDP", mesh["dp_replicate", "dp_shard"]) if hybrid else ("FSDP", mesh["dp_shard"])
        )

        if experts_mesh is not None:
            policy["shard_placement_fn"] = _place_experts(model, spec, experts_mesh)

        def wrap(module: Any, reshard_after: bool) -> None:
            fully_shard(module, mesh=dp_mesh, reshard_after_forward=reshard_after, **policy)

    between = reshard == "always" or (reshard == "default" and dims.pp == 1)
    blocks = list(blocks)
    for block in blocks:
        wrap(block, between)
    head = _present(model, spec.last_modules)
    if head and not _share_parameters(head, _present(model, spec.first_modules)):
        wrap(head, reshard == "always")
    wrap(model, reshard == "always")
    # The host waits for the number of rows that experts receive, so FSDP2's own prefetching, which
    # starts when a block starts, is too late.
    if (prefetch_depth > 1 or experts_mesh is not None) and name != "DDP":
        prefetch_blocks(blocks, prefetch_depth)
    module: Any
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    return name


def _place_experts(model: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> Callable[[Any], Any]:
    """Return FSDP2's `shard_placement_fn`: experts are sharded over `efsdp` of their own mesh.

    Each rank gets whole experts. If there are more ranks than experts, each gets a part of every
    weight matrix instead, where the sizes allow it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )
    from torch.distributed.tensor import Shard

    from torchtitan_like.distributed.expert_parallel import expert_parameters

    info: FSDPMeshInfo
    if "dp_replicate" in (mesh.mesh_dim_names or ()):
        info = HSDPMeshInfo(mesh["dp_replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    num_shards = mesh["efsdp"].size()
    experts = {id(parameter) for parameter in expert_parameters(model, spec).values()}

    def shard_placement(parameter: Any) -> Any:
        if id(parameter) not in experts:
            return None
        num_experts, size, *_ = parameter.to_local().shape
        splits_matrices = num_experts < num_shards and size % num_shards == 0
        return ShardPlacementResult(Shard(int(splits_matrices)), info)

    return shard_placement


def prefetch_blocks(blocks: Sequence[Any], depth: int) -> None:
    """Gather the weights of the next `depth` blocks while one block computes."""
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(i - depth, 0) : i][::-1])


def _present(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules of these names that this pipeline stage has."""
    modules = dict(model.named_modules())
    return [modules[name] for name in names if name in modules]


def _share_parameters(some: list[nn.Module], others: list[nn.Module]) -> bool:
    """Return True if a weight is tied between the two: it must then be in one FSDP group."""
    seen = {id(p) for module in others for p in module.parameters()}
    return any(id(p) in seen for module in some for p in module.parameters())


def free_gathered(parts: Iterable[nn.Module]) -> None:
    """Free the gathered weights that FSDP2 keeps after a forward.

    Call it after a change of the weights between two forwards without a backward: the second one
    would use the gathered weights of the first one.
    """
    module: Any
    for part in parts:
        for module in part.modules():
            if hasattr(module, "reshard"):
                module.reshard()


class GradientSync:
    """Selects the gradient collectives of each micro-batch's backward.

    Sharded gradients are reduce-scattered in every micro-batch, so that only fp32 shards are
    accumulated. The all-reduce over replicas (DDP, HSDP) runs in the last one only: with n
    micro-batches its traffic is 1/n.
    """

    def __init__(self, model: nn.Module, dims: ParallelDims) -> None:
        self._root: Any = model if hasattr(model, "set_requires_gradient_sync") else None
        self._replicated = dims.dp_shard * dims.cp == 1 and not dims.has_experts_mesh
        self._is_last = True  # the initial state of FSDP2

    def prepare(self, is_last: bool) -> None:
        """Call before the forward of each micro-batch."""
        if self._root is None or is_last == self._is_last:
            return
        self._is_last = is_last
        self._root.set_is_last_backward(is_last)
        if self._replicated:
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)
