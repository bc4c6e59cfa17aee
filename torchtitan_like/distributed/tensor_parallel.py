"""Tensor parallelism: shard each layer's weights by the sharding roles of the model's table.

The ranks compute with their shards and exchange activations at the start and end of each layer
(Shoeybi et al. 2019, arXiv:1909.08053). With sequence parallelism, activations between layers
(residual stream, norms) are sharded along the sequence, so that nothing is computed or stored twice
(Korthikanti et al. 2022, arXiv:2205.05198). The traffic is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from torchtitan_like.distributed.collectives import (
    add_once,
    copy_to,
    gather_along,
    gather_whole,
    reduce_from,
    scatter_sum_along,
)
from torchtitan_like.distributed.views import to_local, view_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.models.spec import ModelSpec

SEQUENCE = 1  # of activations (batch, seq, dim)


class Rule(NamedTuple):
    """The collectives of a sharding role.

    shard_dim: dimension of the weight that is sharded; None: replicated.
    gather_input: whether the input is gathered: for the module that owns the weight ("own"), or
        once for all children of its parent ("parent").
    output: how the module's output is combined: "sum" over ranks, "lookup" of each rank's entries
        followed by the sum, "logits" gathered.
    partial_gradient: when ranks see different inputs of a replicated weight, so that its gradient
        is the sum over ranks: "never", with "sequence parallel", or "always".
    """

    shard_dim: int | None
    gather_input: Literal["own", "parent"] | None = None
    output: Literal["sum", "lookup", "logits"] | None = None
    partial_gradient: Literal["never", "sequence parallel", "always"] = "never"


RULES = {
    "vocab_embedding": Rule(shard_dim=0, output="lookup"),
    "column": Rule(shard_dim=0, gather_input="parent"),
    "row": Rule(shard_dim=1, output="sum"),
    "output": Rule(shard_dim=0, gather_input="own", output="logits"),
    "norm": Rule(shard_dim=None, partial_gradient="sequence parallel"),
    "head_norm": Rule(shard_dim=None, partial_gradient="always"),
    "head_scalar": Rule(shard_dim=0),
    "latent": Rule(shard_dim=None, partial_gradient="always"),
    "projection": Rule(shard_dim=None, partial_gradient="sequence parallel"),
    # Each rank routes and computes its own part of the sequence, with all experts.
    "router": Rule(shard_dim=None, partial_gradient="sequence parallel"),
    "experts": Rule(shard_dim=None, partial_gradient="sequence parallel"),  # see expert_parallel.py
}


class RuledParameter(NamedTuple):
    """A parameter, its name in the model, and the rule for it."""

    fqn: str
    parameter: nn.Parameter
    rule: Rule

    @property
    def module(self) -> str:
        return self.fqn.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.fqn.rpartition(".")[2]

    @property
    def placement(self) -> Shard | Replicate:
        """The weight's placement. A row-wise layer's bias lacks the sharded dimension."""
        shard_dim = self.rule.shard_dim
        is_replicated = shard_dim is None or shard_dim >= self.parameter.ndim
        return Replicate() if is_replicated else Shard(shard_dim or 0)

    def problems(self, num_ranks: int) -> Iterator[str]:
        """Yield one sentence for each problem of its size.

        A vocabulary need not be a multiple of the number of ranks. Features must be: they belong to
        heads or to another layer's rows.
        """
        if isinstance(self.placement, Replicate):
            return
        size = self.parameter.shape[self.placement.dim]
        if self.rule.output in ("lookup", "logits"):
            if (num_ranks - 1) * -(-size // num_ranks) >= size:
                yield f"{self.fqn}: {size} entries leave some of {num_ranks} ranks without any"
        elif size % num_ranks:
            yield f"{self.fqn}: {num_ranks} ranks do not divide its {size} features"

    def view(self, sequence_parallel: bool) -> str:
        """Return the key in `_views` of the view that its module reads."""
        if self.rule.output == "sum" and self.placement.is_replicate():
            return "added once"
        partial = self.rule.partial_gradient
        is_partial = partial == "always" or (partial == "sequence parallel" and sequence_parallel)
        return "summed in backward" if is_partial else "local"


def apply_tensor_parallel(
    model: nn.Module, spec: ModelSpec, mesh: DeviceMesh, *, sequence_parallel: bool
) -> list[str]:
    """Shard a model on meta over the 1-D `mesh`, in place; return lines for the log.

    Parameters become DTensors, their modules read local tensors, and hooks run the collectives.
    Raises ValueError with one line for each parameter that does not fit; the model is then
    unchanged.
    """
    ruled = _read_table(model, spec, mesh.size())
    views, placed = _views(mesh.get_group()), {}
    for each in ruled:
        parameter = each.parameter
        if id(parameter) not in placed:  # a tied weight stays one
            # src_data_rank None: nothing is sent, as meta tensors have no values.
            dtensor = distribute_tensor(parameter, mesh, [each.placement], src_data_rank=None)
            placed[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        module = model.get_submodule(each.module)
        module._parameters[each.name] = placed[id(parameter)]
        view_parameter(module, each.name, views[each.view(sequence_parallel)])
    _add_hooks(model, ruled, mesh.get_group(), sequence_parallel)
    with_or_without = "with" if sequence_parallel else "without"
    return [
        f"Applied Tensor Parallelism to the model (over {mesh.size()} ranks, {with_or_without} "
        "sequence parallelism)"
    ]


def overlap_tensor_parallel(group: ProcessGroup) -> dict[str, Any]:
    """Let the ranks' GPUs read each other's memory; return the torch.compile options that use it.

    Inductor then splits a matrix product next to an all-gather or reduce-scatter into chunks, and
    overlaps computing each chunk with sending another. Raises RuntimeError if the GPUs cannot read
    each other's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        # torch 2.13 deprecates the call, but Inductor still requires it.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric_memory.get_symm_mem_workspace(group.group_name, min_size=1)
    except RuntimeError as error:
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel = true: expected {group.size()} GPUs that read "
            f"each other's memory (NVLink, symmetric memory of torch.distributed); {error} -> set it "
            "to false, or parallelism.tensor_parallel_degree to a number of GPUs that do"
        ) from error
    return {"_micro_pipeline_tp": True}


def _read_table(model: nn.Module, spec: ModelSpec, num_ranks: int) -> list[RuledParameter]:
    ruled: list[RuledParameter] = []
    problems: list[str] = []
    first: dict[int, RuledParameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            continue  # of experts, which expert parallelism has sharded
        roles = [role for pattern, role in spec.sharding if fnmatchcase(fqn, pattern)]
        if len(roles) != 1 or roles[0] not in RULES:
            actual = (
                f"matches the rows {roles}" if len(roles) != 1 else f"has the role {roles[0]!r}"
            )
            problems.append(
                f"{fqn} {actual}: expected exactly one row, with a role of {', '.join(RULES)}"
            )
            continue
        each = RuledParameter(fqn, parameter, RULES[roles[0]])
        ruled.append(each)
        problems += each.problems(num_ranks)
        other = first.setdefault(id(parameter), each)
        if other.placement != each.placement:
            problems.append(
                f"{fqn} is tied to {other.fqn}, but placed as {each.placement} and not as "
                f"{other.placement}"
            )
    if problems:
        raise ValueError(
            f"{spec.name} cannot be sharded by tensor parallelism:\n" + "\n".join(problems)
        )
    return ruled


def _views(group: ProcessGroup) -> dict[str, Callable[[Any], Tensor]]:
    """Return the views that modules read. Modules share them, so that blocks share one compilation.

    While FSDP2 holds a parameter sharded, no forward reads it. FSDP2 itself reads it, to set its
    gradient: a view must then return the parameter itself.
    """

    def local(parameter: Any) -> Tensor:
        return to_local(parameter)

    def summed(parameter: Any) -> Tensor:
        return copy_to(to_local(parameter), group)

    def added_once(parameter: Any) -> Tensor:
        return add_once(to_local(parameter), group)

    def unless_sharded(view: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def read(parameter: Any) -> Tensor:
            is_sharded = len(getattr(parameter, "placements", ())) > 1
            return parameter if is_sharded else view(parameter)

        return read

    views = {"local": local, "summed in backward": summed, "added once": added_once}
    return {name: unless_sharded(view) for name, view in views.items()}


# ---- activations at the input and output of a module


def _add_hooks(
    model: nn.Module, ruled: list[RuledParameter], group: ProcessGroup, sequence_parallel: bool
) -> None:
    """Add each hook once, even if several parameters of a module need it."""

    def gather_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise TypeError(
                f"{type(module).__name__} was called without positional arguments. Tensor parallelism "
                "expects the hidden states as the first one: pass them by position"
            )
        x = gather_along(args[0], SEQUENCE, group) if sequence_parallel else copy_to(args[0], group)
        return (x, *args[1:])

    def sum_output(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        return scatter_sum_along(x, SEQUENCE, group) if sequence_parallel else reduce_from(x, group)

    owners = {each.module: each for each in ruled}
    parents = {
        fqn.rpartition(".")[0] for fqn, each in owners.items() if each.rule.gather_input == "parent"
    }
    own = [fqn for fqn, each in owners.items() if each.rule.gather_input == "own"]
    for fqn in [*parents, *own]:
        model.get_submodule(fqn).register_forward_pre_hook(gather_input)
    for fqn, each in owners.items():
        module = model.get_submodule(fqn)
        num_entries = each.parameter.shape[0]
        if each.rule.output == "lookup":
            _look_up_local_entries(module, num_entries, group)
        if each.rule.output in ("lookup", "sum"):
            module.register_forward_hook(sum_output)
        elif each.rule.output == "logits":
            module.register_forward_hook(_gather_logits(num_entries, group))


def _look_up_local_entries(embedding: Any, num_entries: int, group: ProcessGroup) -> None:
    """Make an embedding (batch, seq) -> (batch, seq, dim) return zero for entries of other ranks."""
    forward, size = embedding.forward, embedding.weight.shape[0]
    first = group.rank() * -(-num_entries // group.size())

    def look_up(ids: Tensor) -> Tensor:
        # No rank has an id beyond the vocabulary. This lookup raises the error of an unsharded
        # table.
        F.embedding(ids, ids.new_zeros(1, 1).expand(num_entries, 1))
        is_local = (ids >= first) & (ids < first + size)
        rows: Tensor = forward((ids - first).where(is_local, 0))
        return rows.masked_fill(~is_local.unsqueeze(-1), 0)

    embedding.forward = look_up


def _gather_logits(num_entries: int, group: ProcessGroup) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a hook that gathers a head's logits; a loss (0-dim) covers the whole vocabulary already."""
    largest = -(-num_entries // group.size())

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.ndim == 0:
            return output
        padded = F.pad(output, (0, largest - output.shape[-1]))
        return gather_whole(padded, output.ndim - 1, group)[..., :num_entries]

    return gather
