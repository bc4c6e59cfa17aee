"""Expert parallelism: each rank has some of the experts, and tokens are sent to them.

A mixture of experts sorts its tokens' copies (*rows*) by expert. Here an all-to-all sends each row
to the rank that has its expert, and a second one sends the result back. No row is padded or
dropped, so ranks receive different numbers of rows. Received rows are sorted by expert, then by the
rank that sent them: the order of the tokens in the batch. So the sums over an expert's rows have
the same order as on one rank.

The ranks of an expert-parallel group are neighbors that would otherwise hold shards of the same
experts: first tensor-parallel ranks, then context-parallel ones, then data-parallel ones
(GShard, arXiv:2006.16668 section 3; TorchTitan borrows the ranks in the same order).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtitan_like.distributed.collectives import (
    add_once,
    arrived,
    exchange_rows,
    gather_along,
    scatter_sum_along,
    start_exchange,
)
from torchtitan_like.distributed.views import to_local, view_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.models.spec import ModelSpec

# The mesh dimensions over which experts are sharded here; FSDP2 shards them over the others.
EXPERTS_DIMS = ("ep", "expert_tp")
# With expert tensor parallelism: the dimension of the hidden units in each stacked parameter. None:
# a bias of the output, which one rank adds.
HIDDEN_DIM = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": None, "b3": 1}


def expert_parameters(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Parameter]:
    """Return the parameters with the sharding role "experts" by fqn."""
    patterns = [pattern for pattern, role in spec.sharding if role == "experts"]
    return {
        fqn: parameter
        for fqn, parameter in model.named_parameters()
        if any(fnmatchcase(fqn, pattern) for pattern in patterns)
    }


def apply_expert_parallel(model: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> list[str]:
    """Shard the experts of a model on meta over `mesh`, in place; return lines for the log.

    mesh: the dimensions of EXPERTS_DIMS that exist. With "expert_tp", each expert's hidden units
        are sharded too. If "ep" has one rank, no rows are exchanged.

    Raises ValueError if a degree does not divide the number of experts or of hidden units.
    """
    splits_hidden = "expert_tp" in (mesh.mesh_dim_names or ())
    group = mesh.get_group("ep")
    added_once = _added_once(mesh.get_group("expert_tp")) if splits_hidden else to_local
    owners = set()
    for fqn, parameter in expert_parameters(model, spec).items():
        owner, _, name = fqn.rpartition(".")
        placements: list[Shard | Replicate] = [Shard(0)]
        view: Callable[[Any], Any] = _local_unless_sharded_further
        if splits_hidden:
            hidden_dim = HIDDEN_DIM[name]
            placements.append(Replicate() if hidden_dim is None else Shard(hidden_dim))
            if hidden_dim is None:
                view = added_once
        _check_even(fqn, parameter, placements, mesh)
        # src_data_rank None: nothing is sent, as meta tensors have no values.
        dtensor = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
        module = model.get_submodule(owner)
        module._parameters[name] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        view_parameter(module, name, view)
        owners.add(owner)
    for owner in sorted(owners):
        if group.size() > 1:
            exchange_with_owners(model.get_submodule(owner), group)
        if splits_hidden:
            gather_tokens(model.get_submodule(owner), mesh.get_group("expert_tp"))
    degrees = [f"experts over {group.size()} ranks"] if group.size() > 1 else []
    if splits_hidden:
        degrees.append(f"each expert's hidden units over {mesh['expert_tp'].size()} ranks")
    if not owners or not degrees:  # a pipeline stage without experts, or FSDP2 alone shards them
        return []
    return [f"Applied Expert Parallelism to the model ({', '.join(degrees)})"]


def _check_even(
    fqn: str, parameter: nn.Parameter, placements: list[Shard | Replicate], mesh: DeviceMesh
) -> None:
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        size, num_ranks = parameter.shape[placement.dim], mesh.size(mesh_dim)
        if size % num_ranks:
            raise ValueError(
                f"{fqn} {tuple(parameter.shape)} cannot be sharded by expert parallelism: {num_ranks} "
                f"ranks do not divide dimension {placement.dim}. Expected a divisor of {size}: "
                "change parallelism.expert_parallel_degree or expert_tensor_parallel_degree"
            )


def _local_unless_sharded_further(parameter: Any) -> Any:
    """As the views of tensor parallelism: FSDP2 reads its shards itself, to set gradients."""
    return parameter if _is_sharded_further(parameter) else to_local(parameter)


def _is_sharded_further(parameter: Any) -> bool:
    names = parameter.device_mesh.mesh_dim_names if hasattr(parameter, "placements") else ()
    return "efsdp" in names


def _added_once(group: ProcessGroup) -> Callable[[Any], Any]:
    """Return the view of a bias whose sum over `group` is the bias."""

    def read(parameter: Any) -> Any:
        if _is_sharded_further(parameter):
            return parameter
        return add_once(to_local(parameter), group)

    return read


def exchange_with_owners(experts: Any, group: ProcessGroup) -> None:
    """Let `experts` (see `models.layers.moe.Experts`) compute rows of all ranks of `group`.

    `find_routes` starts the exchange of the numbers of rows. `compute_rows` waits for it, and
    sends the rows.
    """
    find_routes = experts.find_routes
    compute_local_rows = experts.compute_rows
    num_ranks = group.size()

    def find_routes_and_count(expert_ids: Tensor) -> Any:
        routes = find_routes(expert_ids)
        counts = _count(routes.ends).view(num_ranks, -1)
        return routes._replace(received_counts=start_exchange(counts, group))

    def compute_rows(rows: Tensor, routes: Any) -> Tensor:
        sent = _count(routes.ends).view(num_ranks, -1)
        received = arrived(routes.received_counts)
        totals = torch.stack([sent.sum(1), received.sum(1)])
        to_send, to_receive = read_split_sizes(totals, rows.shape[0])
        arriving = exchange_rows(rows, to_send, to_receive, group)
        position = _expert_major(received, arriving.shape[0])
        source = torch.empty_like(position).scatter(
            0, position, torch.arange(arriving.shape[0], device=rows.device)
        )
        ends = received.sum(0).cumsum(0).to(routes.ends.dtype)
        computed = compute_local_rows(
            _permute(arriving, source, position), routes._replace(ends=ends)
        )
        return exchange_rows(_permute(computed, position, source), to_receive, to_send, group)

    experts.find_routes = find_routes_and_count
    experts.compute_rows = compute_rows


def gather_tokens(experts: Any, group: ProcessGroup) -> None:
    """Let each rank of `group` compute the tokens of all with its part of each expert's hidden units.

    The sums over the hidden units are then partial: they are added, and each rank keeps its tokens.
    """
    find_routes = experts.find_routes
    forward = experts.forward

    def find_routes_of_all(expert_ids: Tensor) -> Any:
        return find_routes(gather_along(expert_ids, 0, group))

    def compute_for_all(tokens: Tensor, weights: Tensor, routes: Any) -> Tensor:
        partial = forward(gather_along(tokens, 0, group), gather_along(weights, 0, group), routes)
        return scatter_sum_along(partial, 0, group)

    experts.find_routes = find_routes_of_all
    experts.forward = compute_for_all


def _count(ends: Tensor) -> Tensor:
    """Return the rows of each expert, int64, from the index after the last row of each."""
    return torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)


def _expert_major(counts: Tensor, num_rows: int) -> Tensor:
    """Return each received row's index after sorting by expert: (num_rows,) int64.

    counts: (ranks, experts), rows from each rank for each expert. Rows arrive in this order.
    """
    blocks = counts.flatten()
    first_before = blocks.cumsum(0) - blocks
    by_expert = counts.T.flatten()
    first_after = (by_expert.cumsum(0) - by_expert).view(counts.T.shape).T.flatten()
    shift = torch.repeat_interleave(first_after - first_before, blocks, output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shift


def _permute(rows: Tensor, source: Tensor, position: Tensor) -> Tensor:
    """Return `rows[source]`; `position` is the inverse permutation."""
    permuted: Tensor = _Permute.apply(rows, source, position)
    return permuted


class _Permute(torch.autograd.Function):
    """A gather whose backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return grad.index_select(0, position), None, None


def read_split_sizes(counts: Tensor, num_rows: int) -> list[list[int]]:
    """Return how many rows go to each rank and come from each, as integers of the host.

    This is the only time a layer waits for the device. A dry run, whose tensors have no values,
    replaces this function and divides `num_rows` evenly.

    counts: (2, ranks) int64. num_rows: the sum of the first row.
    """
    on_host = torch.ops.torchtitan_like.copy_to_host(counts)
    lists: list[list[int]] = on_host.tolist()
    if torch.compiler.is_compiling():
        for number in (number for row in lists for number in row):
            torch._check(number >= 0)
    return lists


# An operator, so that activation checkpointing can keep its output: recomputation then does not
# wait for the device.
@torch.library.custom_op("torchtitan_like::copy_to_host", mutates_args=())
def _copy_to_host(values: Tensor) -> Tensor:
    return values.to("cpu", copy=True)


@_copy_to_host.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu")
