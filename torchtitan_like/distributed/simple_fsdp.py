"""SimpleFSDP (arXiv:2411.00284): data parallelism that is nothing but operations in the model's own graph.

Each parameter is a DTensor cut along its first dimension, as FSDP2 cuts it: initial weights, optimizers, clipping and
checkpoints see no difference. Where module code reads a parameter it finds all of it, gathered by a differentiable
operation whose backward reduces the gradient. There are no hooks and no streams, so torch.compile can take the whole model
as one graph, and move, merge and overlap the collectives in it.

Gradients are *summed* over ranks, as everywhere here. NOTE: every micro-batch reduces its own, also over replicas: nothing in
a graph says which micro-batch is the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_like.distributed.bucketing import bucketing_backend
from torchtitan_like.distributed.collectives import arrived
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.views import View, on_local_parameters, to_local, view_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.distributed.dims import ParallelDims
    from torchtitan_like.models.spec import ModelSpec

# By the names they have in all supported versions of torch; their Python wrappers return tensors that wait at first use.
_ops = torch.ops._c10d_functional


def apply_simple_fsdp(
    model: nn.Module,
    spec: ModelSpec,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh | None,
    dims: ParallelDims,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard: Literal["always", "default", "never"],
    compiled: bool,
) -> str:
    """Cut or replicate the parameters of a model on meta, in place, where `apply_data_parallel` would.

    As with FSDP2 a gathered weight is freed when the forward of its block ends, and gathered again for backward; that of the
    head, which backward wants first, only under "always"; with pipelines "default" frees none. compiled: the model's forward
    is, or that of each block. mesh: None for one rank; its parameters stay plain tensors, and a cast is all that is left of a
    gather. NOTE: what eager activation checkpointing computes again, it also gathers again.
    Returns the name of what was applied, for the log.
    """
    layout = _Layout.of(mesh)
    modules = dict(model.named_modules())
    between = reshard == "always" or (reshard == "default" and dims.pp == 1)
    units = [_Unit(model, between)]
    units += [_Unit(modules[fqn], reshard == "always") for fqn in spec.last_modules if fqn in modules]
    units += [_Unit(block, between) for block in blocks]
    units_of = {module: unit for unit in units for module in unit.module.modules()}  # the innermost comes last
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for module, unit in units_of.items():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in cut:  # a tied weight stays one
                cut[parameter] = layout.cut(parameter)
            num_rows = to_local(parameter).shape[0]
            module._parameters[name] = cut[parameter]
            view = _gathering(num_rows, layout, DTYPES[param_dtype], DTYPES[reduce_dtype])
            if not layout.copies_only:
                view = _recomputed(view, unit.frees) if compiled else unit.watched(view)
            view_parameter(module, name, view)
    for unit in units:
        if unit.frees and not layout.copies_only and not compiled:
            unit.wrap_forward()
    if layout.replicas is None:
        return "SimpleFSDP"
    return "SimpleFSDP (replicated)" if layout.copies_only else "SimpleFSDP (hybrid)"


def compile_model(
    model: nn.Module,
    backend: Any,
    mesh: DeviceMesh | None = None,
    buckets: Collection[str] = (),
    options: dict[str, Any] | None = None,
) -> None:
    """Compile the forward of a model as one graph with all its collectives. Names do not change.

    buckets: the fqns of the modules that are to send what their weights need in one collective; `mesh` is then needed.
    options: the backend's, if it takes any.
    """
    if buckets and mesh is not None:
        layout = _Layout.of(mesh)
        groups = [group.group_name for group in (layout.shards, layout.replicas) if group is not None]
        backend, options = bucketing_backend(backend, buckets, groups, options), None
    compiled = torch.compile(model.forward, backend=backend, options=options or None, fullgraph=True)
    model.forward = on_local_parameters(model, compiled)


class _Layout(NamedTuple):
    """Over which ranks weights are cut, and over which they are copied; None where there is one rank. `tp` is not asked."""

    mesh: DeviceMesh | None
    shards: ProcessGroup | None
    replicas: ProcessGroup | None

    @property
    def copies_only(self) -> bool:
        """As under DDP: each rank keeps all weights, also in the type in which it computes."""
        return self.shards is None and self.replicas is not None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> _Layout:
        if mesh is None:
            return cls(None, None, None)
        names = mesh.mesh_dim_names or ()
        groups = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
        return cls(mesh, groups.get("dp_shard"), groups.get("dp_replicate"))

    def cut(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows, as `torch.chunk` deals them, as a DTensor placed as FSDP2 would place it."""
        if self.mesh is None:
            return parameter
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.placement_types import Placement, _StridedShard

        over_tp: tuple[Placement, ...] = getattr(parameter, "placements", ())
        placements: dict[str, Placement] = {"dp_replicate": Replicate(), "dp_shard": Shard(0)}
        if Shard(0) in over_tp:  # the ranks of `tp` have cut the rows first, though they come last in the mesh
            placements["dp_shard"] = _StridedShard(0, split_factor=self.mesh["tp"].size())
        if over_tp:
            placements["tp"] = over_tp[0]
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name in placements)
        local = to_local(parameter).detach()
        if "dp_shard" in names:
            num_ranks, rank = self.mesh["dp_shard"].size(), self.mesh.get_local_rank("dp_shard")
            most = -(-local.shape[0] // num_ranks)
            first = min(rank * most, local.shape[0])
            local = local.narrow(0, first, min(most, local.shape[0] - first))
        dtensor = DTensor.from_local(
            local,
            self.mesh[names],
            [placements[name] for name in names],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


# ---- the whole of a weight


def _gathering(num_rows: int, layout: _Layout, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> View:
    """A view that makes the whole weight, (num_rows, ...) in `param_dtype`, of this rank's rows."""
    shards, replicas = layout.shards, layout.replicas
    names = ["" if group is None else group.group_name for group in (shards, replicas)]
    num_ranks = 1 if shards is None else shards.size()

    def view(parameter: Any) -> Tensor:
        shard = to_local(parameter)
        whole: Tensor = _GatherWeight.apply(shard, num_rows, num_ranks, *names, param_dtype, reduce_dtype)
        return whole

    return view


class _GatherWeight(torch.autograd.Function):
    """Forward: cast to `param_dtype`, then all-gather. Backward: cast to `reduce_dtype`, reduce-scatter (sum) over the ranks
    that share the weight, all-reduce (sum) over those that have copies of it, cast to the weight's own type.

    One function, because a gradient between two functions would have to have the narrow type. On the wire the rows of all
    ranks are padded to those of the first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        num_rows: int,
        num_ranks: int,
        shards: str,
        replicas: str,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> Tensor:
        ctx.num_rows, ctx.num_ranks, ctx.shards, ctx.replicas = num_rows, num_ranks, shards, replicas
        ctx.own_rows, ctx.dtype, ctx.reduce_dtype = shard.shape[0], shard.dtype, reduce_dtype
        shard = shard.to(param_dtype)
        if not shards:
            return shard.view_as(shard)
        rows = _with_rows(shard, -(-num_rows // num_ranks))
        return _with_rows(arrived(_ops.all_gather_into_tensor(rows, num_ranks, shards)), num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.to(ctx.reduce_dtype)
        if ctx.shards:
            rows = _with_rows(grad, -(-ctx.num_rows // ctx.num_ranks) * ctx.num_ranks).contiguous()
            grad = arrived(_ops.reduce_scatter_tensor(rows, "sum", ctx.num_ranks, ctx.shards))
            grad = _with_rows(grad, ctx.own_rows)
        if ctx.replicas:
            grad = arrived(_ops.all_reduce(grad.contiguous(), "sum", ctx.replicas))
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of `x`, with rows of zeros where it has fewer."""
    if x.shape[0] < num_rows:
        return F.pad(x, [0, 0] * (x.ndim - 1) + [0, num_rows - x.shape[0]])
    return x if x.shape[0] == num_rows else x.narrow(0, 0, num_rows)


# ---- gathered again for backward


def _recomputed(gather: View, frees: bool) -> View:
    """In a compiled graph: whether backward gathers again or keeps is written on the operations, for the partitioner."""
    policy = CheckpointPolicy.MUST_RECOMPUTE if frees else CheckpointPolicy.MUST_SAVE

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy

    contexts = partial(create_selective_checkpoint_contexts, decide)

    def view(parameter: Any) -> Tensor:
        whole: Tensor = checkpoint(
            gather, to_local(parameter), use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return whole

    return view


class _Unit:
    """Eagerly: a module at the end of whose forward gathered weights are freed, if `frees`.

    What autograd would keep of them (the weight itself or a view, a transposed one say) is replaced by how to gather it.
    """

    def __init__(self, module: nn.Module, frees: bool) -> None:
        self.module, self.frees = module, frees
        self._is_running = False
        # By where in memory, which nobody else can have as long as the tensor stands here too.
        self._gathered: dict[int, tuple[Tensor, View, Tensor]] = {}

    def watched(self, gather: View) -> View:
        """`gather`, with a note of what it has gathered for this module's forward."""

        def view(parameter: Any) -> Tensor:
            shard = to_local(parameter)
            whole = gather(shard)
            if self._is_running:
                self._gathered[whole.untyped_storage().data_ptr()] = (whole, gather, shard.detach())
            return whole

        return view if self.frees else gather

    def wrap_forward(self) -> None:
        forward = self.module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._is_running = True
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    return forward(*args, **kwargs)
            finally:
                self._is_running = False
                self._gathered.clear()

        self.module.forward = run

    def _pack(self, tensor: Tensor) -> Tensor | _Again:
        found = self._gathered.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        _, gather, shard = found
        return _Again(gather, shard, tensor.size(), tensor.stride(), tensor.storage_offset())


class _Again(NamedTuple):
    """How to make a view of a gathered weight anew."""

    gather: View
    shard: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


@torch.no_grad()
def _unpack(kept: Tensor | _Again) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.gather(kept.shard).as_strided(kept.size, kept.stride, kept.offset)
