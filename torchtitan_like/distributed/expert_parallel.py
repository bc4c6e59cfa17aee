"""Expert parallelism: each rank has some of the experts, and tokens are sent to them.

The ranks of an expert-parallel group are neighbors that would otherwise hold shards of the same
experts: first tensor-parallel ranks, then context-parallel ones, then data-parallel ones
(GShard, arXiv:2006.16668 section 3; TorchTitan borrows the ranks in the same order).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtitan_like.distributed.collectives import add_once, gather_along, scatter_sum_along
from torchtitan_like.distributed.row_exchange import RowExchange, exchange_with_owners
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


def apply_expert_parallel(
    model: nn.Module, spec: ModelSpec, mesh: DeviceMesh, exchange: RowExchange
) -> list[str]:
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
            exchange_with_owners(model.get_submodule(owner), group, exchange)
        if splits_hidden:
            gather_tokens(model.get_submodule(owner), mesh.get_group("expert_tp"))
    degrees = [f"experts over {group.size()} ranks"] if group.size() > 1 else []
    if degrees and exchange.is_bounded:
        degrees.append(f"buffers of {exchange.capacity} times an even share of rows")
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


def gather_tokens(experts: Any, group: ProcessGroup) -> None:
    """Let each rank of `group` compute the tokens of all with its part of each expert's hidden units.

    The sums over the hidden units are then partial: they are added, and each rank keeps its tokens.
    """
    find_routes = experts.find_routes
    send = experts.send
    forward = experts.forward

    def find_routes_of_all(expert_ids: Tensor, weights: Tensor) -> Any:
        return find_routes(gather_along(expert_ids, 0, group), gather_along(weights, 0, group))

    def send_all(tokens: Tensor, routes: Any) -> Tensor:
        rows: Tensor = send(gather_along(tokens, 0, group), routes)
        return rows

    def compute_for_all(rows: Tensor, routes: Any) -> Tensor:
        partial: Tensor = forward(rows, routes)
        return scatter_sum_along(partial, 0, group)

    experts.find_routes = find_routes_of_all
    experts.send = send_all
    experts.forward = compute_for_all
