"""SimpleFSDP (arXiv:2411.00284): data parallelism as operations in the model's own graph.

Each parameter is a DTensor sharded along its first dimension, as with FSDP2: initial weights,
optimizers, clipping, and checkpoints need no change. Module code that reads a parameter gets the
gathered weight from a differentiable operation, whose backward reduces the gradient. There are no
hooks and no streams. So torch.compile can capture the whole model as one graph, and move, merge,
and overlap the collectives in it.

A single rank gathers nothing: the operation is then only a cast to the compute dtype, as
`cast_weights` applies it to every single rank that computes in another dtype than it stores.

Gradients are *summed* over ranks. NOTE: every micro-batch reduces its gradients, also over
replicas, since a graph does not contain which micro-batch is the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_like.distributed.bucketing import bucketing_backend
from torchtitan_like.distributed.collectives import arrived
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.views import View, on_local_parameters, to_local, view_parameter
from torchtitan_like.util.compile import compile_function

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.distributed.dims import ParallelDims
    from torchtitan_like.models.spec import ModelSpec

# These names exist in all supported versions of torch. Their Python wrappers return tensors of a
# type that waits at first use.
_ops = torch.ops._c10d_functional


def apply_simple_fsdp(
    model: nn.Module,
    spec: ModelSpec,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    dims: ParallelDims,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard: Literal["always", "default", "never"],
    compiled: bool,
) -> str:
    """Shard or replicate the parameters of a model on meta, in place, like `apply_data_parallel`.

    reshard: as in `apply_data_parallel`: whether a gathered weight is freed at the end of its block's
        forward and gathered again for backward.
    compiled: whether the model or each block will be compiled.

    NOTE: eager activation checkpointing gathers again what it recomputes.

    Returns the name of the method, for the log.
    """
    layout = _Layout.of(mesh)
    _view_weights(model, spec, blocks, layout, dims, param_dtype, reduce_dtype, reshard, compiled)
    if layout.replicas is None:
        return "SimpleFSDP"
    return "SimpleFSDP (replicated)" if layout.is_replicated else "SimpleFSDP (hybrid)"


def cast_weights(
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
) -> None:
    """Cast each weight of a rank that gathers nothing to the compute dtype where it is read.

    The arguments equal `apply_simple_fsdp`'s: a cast weight is freed and made again as a
    gathered one is. mesh: None for one rank, whose parameters stay plain tensors.
    """
    layout = _Layout.of(mesh)
    _view_weights(model, spec, blocks, layout, dims, param_dtype, reduce_dtype, reshard, compiled)


def _view_weights(
    model: nn.Module,
    spec: ModelSpec,
    blocks: Iterable[nn.Module],
    layout: _Layout,
    dims: ParallelDims,
    param_dtype: str,
    reduce_dtype: str,
    reshard: Literal["always", "default", "never"],
    compiled: bool,
) -> None:
    """Shard the parameters, and let module code read each through its view."""
    modules = dict(model.named_modules())
    between = reshard == "always" or (reshard == "default" and dims.pp == 1)
    units = [_Unit(model, between)]
    units += [
        _Unit(modules[fqn], reshard == "always") for fqn in spec.last_modules if fqn in modules
    ]
    units += [_Unit(block, between) for block in blocks]
    # The innermost unit comes last.
    units_of = {module: unit for unit in units for module in unit.module.modules()}
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module, unit in units_of.items():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in sharded:  # a tied weight stays one
                sharded[parameter] = layout.shard(parameter)
            num_rows = to_local(parameter).shape[0]
            module._parameters[name] = sharded[parameter]
            view = _gather_view(num_rows, layout, DTYPES[param_dtype], DTYPES[reduce_dtype])
            if not layout.is_replicated:
                view = _recompute_view(view, unit.frees) if compiled else unit.record_view(view)
            view_parameter(module, name, view)
    for unit in units:
        if unit.frees and not layout.is_replicated and not compiled:
            unit.wrap_forward()


def compile_model(
    model: nn.Module,
    backend: Any,
    mesh: DeviceMesh | None = None,
    buckets: Collection[str] = (),
    options: dict[str, Any] | None = None,
) -> None:
    """Compile the forward of a model as one graph with all its collectives.

    Parameter names do not change.

    buckets: fqns of modules, each of which merges the collectives of its weights; requires `mesh`.
    options: options of the backend.
    """
    if buckets and mesh is not None:
        layout = _Layout.of(mesh)
        process_groups = (layout.shards, layout.replicas)
        groups = [group.group_name for group in process_groups if group is not None]
        backend, options = bucketing_backend(backend, buckets, groups, options), None
    forward = compile_function(
        model.forward, backend=backend, options=options or None, fullgraph=True
    )
    model.forward = on_local_parameters(model, forward)


class _Layout(NamedTuple):
    """The groups over which weights are sharded and replicated, except `tp`; None for one rank."""

    mesh: DeviceMesh | None
    shards: ProcessGroup | None
    replicas: ProcessGroup | None

    @property
    def is_replicated(self) -> bool:
        """True as with DDP: each rank keeps all weights, and a copy in the compute dtype."""
        return self.shards is None and self.replicas is not None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> _Layout:
        if mesh is None:
            return cls(None, None, None)
        names = mesh.mesh_dim_names or ()
        groups = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
        return cls(mesh, groups.get("dp_shard"), groups.get("dp_replicate"))

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows, as `torch.chunk` divides them, as a DTensor placed like FSDP2's."""
        if self.mesh is None:
            return parameter
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.placement_types import Placement, _StridedShard

        over_tp: tuple[Placement, ...] = getattr(parameter, "placements", ())
        placements: dict[str, Placement] = {"dp_replicate": Replicate(), "dp_shard": Shard(0)}
        if Shard(0) in over_tp:  # `tp` shards the rows first, although it is last in the mesh
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


# ---- gathered weights


def _gather_view(
    num_rows: int, layout: _Layout, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> View:
    """Return a view that gathers the weight, (num_rows, ...) in `param_dtype`, from the rank's rows."""
    shards, replicas = layout.shards, layout.replicas
    names = ["" if group is None else group.group_name for group in (shards, replicas)]
    num_ranks = 1 if shards is None else shards.size()

    def view(parameter: Any) -> Tensor:
        shard = to_local(parameter)
        gathered: Tensor = _GatherWeight.apply(
            shard, num_rows, num_ranks, *names, param_dtype, reduce_dtype
        )
        return gathered

    return view


class _GatherWeight(torch.autograd.Function):
    """Forward: cast to `param_dtype`, all-gather.

    Backward: cast to `reduce_dtype`, reduce-scatter (sum) over shards, all-reduce (sum) over
    replicas, cast to the weight's own dtype. It is one function because autograd would cast a
    gradient between two functions to `param_dtype`. For communication, the shard of each
    rank is padded to the number of rows of the first one.
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
        ctx.num_rows = num_rows
        ctx.num_ranks = num_ranks
        ctx.shards = shards
        ctx.replicas = replicas
        ctx.own_rows = shard.shape[0]
        ctx.dtype = shard.dtype
        ctx.reduce_dtype = reduce_dtype
        shard = shard.to(param_dtype)
        if not shards:
            return shard.view_as(shard)
        rows = _with_rows(shard, -(-num_rows // num_ranks))
        return _with_rows(arrived(_ops.all_gather_into_tensor(rows, num_ranks, shards)), num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.to(ctx.reduce_dtype)
        if ctx.shards:
            padded_rows = -(-ctx.num_rows // ctx.num_ranks) * ctx.num_ranks
            rows = _with_rows(grad, padded_rows).contiguous()
            grad = arrived(_ops.reduce_scatter_tensor(rows, "sum", ctx.num_ranks, ctx.shards))
            grad = _with_rows(grad, ctx.own_rows)
        if ctx.replicas:
            grad = arrived(_ops.all_reduce(grad.contiguous(), "sum", ctx.replicas))
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    """Return the first rows of `x`, padded with rows of zeros if it has fewer."""
    if x.shape[0] < num_rows:
        return F.pad(x, [0, 0] * (x.ndim - 1) + [0, num_rows - x.shape[0]])
    return x if x.shape[0] == num_rows else x.narrow(0, 0, num_rows)


# ---- gathered again for backward


def _recompute_view(gather: View, frees: bool) -> View:
    """For compiled graphs: mark the gather as recomputed or saved, for the graph's partitioner."""
    policy = CheckpointPolicy.MUST_RECOMPUTE if frees else CheckpointPolicy.MUST_SAVE

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy

    contexts = partial(create_selective_checkpoint_contexts, decide)

    def view(parameter: Any) -> Tensor:
        gathered: Tensor = checkpoint(
            gather,
            to_local(parameter),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        )
        return gathered

    return view


class _Unit:
    """For eager models: a module that frees gathered weights at the end of its forward, if `frees`.

    Where autograd would save a gathered weight or a view of it, it saves how to gather it again.
    """

    def __init__(self, module: nn.Module, frees: bool) -> None:
        self.module = module
        self.frees = frees
        self._is_running = False
        # Keyed by address, which is unique while the tensor is held here.
        self._gathered: dict[int, tuple[Tensor, View, Tensor]] = {}

    def record_view(self, gather: View) -> View:
        """Wrap `gather` to record what it gathers during this module's forward."""

        def view(parameter: Any) -> Tensor:
            shard = to_local(parameter)
            gathered = gather(shard)
            if self._is_running:
                # Of the storage, not of its data: fake tensors have none.
                address = gathered.untyped_storage()._cdata
                self._gathered[address] = (gathered, gather, shard.detach())
            return gathered

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

    def _pack(self, tensor: Tensor) -> Tensor | _Regather:
        record = self._gathered.get(tensor.untyped_storage()._cdata)
        if record is None:
            return tensor
        _, gather, shard = record
        return _Regather(gather, shard, tensor.size(), tensor.stride(), tensor.storage_offset())


class _Regather(NamedTuple):
    """Gathers a weight again, and returns a view of it."""

    gather: View
    shard: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


@torch.no_grad()
def _unpack(saved: Tensor | _Regather) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.gather(saved.shard).as_strided(saved.size, saved.stride, saved.offset)
