"""Tensor parallelism: each layer's weights are cut over the ranks, as the words of a model's sharding table say.

The ranks compute with their parts and exchange activations where a layer begins and where it ends (Shoeybi et al. 2019,
arXiv:1909.08053). With sequence parallelism what lies between layers (residual stream, norms) is cut along the sequence,
so that nothing is computed or kept twice (Korthikanti et al. 2022, arXiv:2205.05198); the traffic is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from torchtitan_like.distributed.collectives import copy_to, gather_along, gather_whole, reduce_from, scatter_sum_along
from torchtitan_like.distributed.views import to_local, view_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torchtitan_like.models.spec import ModelSpec

SEQUENCE = 1  # of activations (batch, seq, dim)


class Rule(NamedTuple):
    """What a word means in collectives.

    cut: the weight's dimension that is cut; None: every rank has all of it.
    enters: whose input is made whole: of the module that owns the weight, or of its parent, for all its parts at once.
    leaves: what becomes of the module's output: summed over ranks; entries looked up here and then summed; logits joined.
    partial: when ranks see different inputs of a whole weight, so that its gradient is the sum of theirs.
    """

    cut: int | None
    enters: Literal["own", "parent"] | None = None
    leaves: Literal["sum", "look-up", "logits"] | None = None
    partial: Literal["never", "split sequence", "always"] = "never"


RULES = {
    "vocab_embedding": Rule(cut=0, leaves="look-up"),
    "column": Rule(cut=0, enters="parent"),
    "row": Rule(cut=1, leaves="sum"),
    "output": Rule(cut=0, enters="own", leaves="logits"),
    "norm": Rule(cut=None, partial="split sequence"),
    "head_norm": Rule(cut=None, partial="always"),
}


class Cut(NamedTuple):
    """One parameter, by the name that it has in the model, and the rule for it."""

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
        """A row-wise layer's bias has no dimension that could be cut."""
        whole = self.rule.cut is None or self.rule.cut >= self.parameter.ndim
        return Replicate() if whole else Shard(self.rule.cut or 0)

    def misfits(self, num_ranks: int) -> Iterator[str]:
        """What is wrong with its size. A vocabulary need not be a multiple of the ranks; features belong to heads or to
        another layer's rows.
        """
        if isinstance(self.placement, Replicate):
            return
        size = self.parameter.shape[self.placement.dim]
        if self.rule.leaves in ("look-up", "logits"):
            if (num_ranks - 1) * -(-size // num_ranks) >= size:
                yield f"{self.fqn}: {size} entries leave some of {num_ranks} ranks without any"
        elif size % num_ranks:
            yield f"{self.fqn}: {num_ranks} ranks do not divide its {size} features"

    def view(self, sequence_parallel: bool) -> str:
        """The key in `_views` of what its module sees."""
        if self.rule.leaves == "sum" and self.placement.is_replicate():
            return "added once"
        partial = self.rule.partial
        is_partial = partial == "always" or (partial == "split sequence" and sequence_parallel)
        return "summed in backward" if is_partial else "local"


def apply_tensor_parallel(model: nn.Module, spec: ModelSpec, mesh: DeviceMesh, *, sequence_parallel: bool) -> list[str]:
    """Cut a model on meta over the 1-D `mesh`, in place; returns lines for the log.

    Parameters become DTensors, their modules see local tensors, and hooks move activations. Raises ValueError with one
    line for each parameter that cannot be cut, and then leaves the model as it is.
    """
    cuts = _read_table(model, spec, mesh.size())
    views, placed = _views(mesh.get_group()), {}
    for cut in cuts:
        parameter = cut.parameter
        if id(parameter) not in placed:  # a tied weight stays one
            # Nothing is sent: the values on meta are nobody's.
            dtensor = distribute_tensor(parameter, mesh, [cut.placement], src_data_rank=None)
            placed[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        module = model.get_submodule(cut.module)
        module._parameters[cut.name] = placed[id(parameter)]
        view_parameter(module, cut.name, views[cut.view(sequence_parallel)])
    _add_hooks(model, cuts, mesh.get_group(), sequence_parallel)
    how = "with" if sequence_parallel else "without"
    return [f"Applied Tensor Parallelism to the model (over {mesh.size()} ranks, {how} sequence parallelism)"]


def overlap_tensor_parallel(group: ProcessGroup) -> dict[str, Any]:
    """Let the ranks' GPUs read each other's memory; returns the options of torch.compile that make use of it.

    Inductor then computes the product behind an all-gather in pieces, each as its part arrives, and the one before a
    reduce-scatter in pieces, each of which is sent while the next is computed. Raises RuntimeError where the GPUs have
    no way to each other's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 calls it needless, but Inductor still asks for it
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric_memory.get_symm_mem_workspace(group.group_name, min_size=1)
    except RuntimeError as error:
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel = true: expected {group.size()} GPUs that read each other's memory "
            f"(NVLink, symmetric memory of torch.distributed); {error} -> set it to false, or "
            "parallelism.tensor_parallel_degree to a number of GPUs that do"
        ) from error
    return {"_micro_pipeline_tp": True}


def _read_table(model: nn.Module, spec: ModelSpec, num_ranks: int) -> list[Cut]:
    cuts: list[Cut] = []
    problems: list[str] = []
    first: dict[int, Cut] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        words = [word for pattern, word in spec.sharding if fnmatchcase(fqn, pattern)]
        if len(words) != 1 or words[0] not in RULES:
            found = f"matches the rows {words}" if len(words) != 1 else f"is a {words[0]!r}"
            problems.append(f"{fqn} {found}: expected exactly one row, with a word of {', '.join(RULES)}")
            continue
        cut = Cut(fqn, parameter, RULES[words[0]])
        cuts.append(cut)
        problems += cut.misfits(num_ranks)
        other = first.setdefault(id(parameter), cut)
        if other.placement != cut.placement:
            problems.append(f"{fqn} is tied to {other.fqn}, but placed as {cut.placement} and not as {other.placement}")
    if problems:
        raise ValueError(f"{spec.name} cannot be cut by tensor parallelism:\n" + "\n".join(problems))
    return cuts


def _views(group: ProcessGroup) -> dict[str, Callable[[Any], Tensor]]:
    """What modules see of their parameters. One function for all modules of a kind: compiled blocks can share it.

    As long as FSDP2 holds a parameter in pieces no forward wants it; only FSDP2 itself looks, for the parameter that it is
    to give its gradient to: no view may put another tensor in its place then.
    """

    def local(parameter: Any) -> Tensor:
        return to_local(parameter)

    def summed(parameter: Any) -> Tensor:
        return copy_to(to_local(parameter), group)

    def added_once(parameter: Any) -> Tensor:
        return summed(parameter) * (group.rank() == 0)

    def unless_in_pieces(view: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        return lambda parameter: parameter if len(getattr(parameter, "placements", ())) > 1 else view(parameter)

    views = {"local": local, "summed in backward": summed, "added once": added_once}
    return {name: unless_in_pieces(view) for name, view in views.items()}


# ---- what happens to activations on the way into a module and out of it


def _add_hooks(model: nn.Module, cuts: list[Cut], group: ProcessGroup, sequence_parallel: bool) -> None:
    """Each once, however many of a module's parameters ask for it."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise TypeError(f"{type(module).__name__} gets its hidden states by position under tensor parallelism")
        x = gather_along(args[0], SEQUENCE, group) if sequence_parallel else copy_to(args[0], group)
        return (x, *args[1:])

    def leave(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        return scatter_sum_along(x, SEQUENCE, group) if sequence_parallel else reduce_from(x, group)

    owners = {cut.module: cut for cut in cuts}
    parents = {fqn.rpartition(".")[0] for fqn, cut in owners.items() if cut.rule.enters == "parent"}
    for fqn in [*parents, *(fqn for fqn, cut in owners.items() if cut.rule.enters == "own")]:
        model.get_submodule(fqn).register_forward_pre_hook(enter)
    for fqn, cut in owners.items():
        module = model.get_submodule(fqn)
        if cut.rule.leaves == "look-up":
            _look_up_own_entries(module, cut.parameter.shape[0], group)
        if cut.rule.leaves in ("look-up", "sum"):
            module.register_forward_hook(leave)
        elif cut.rule.leaves == "logits":
            module.register_forward_hook(_join_logits(cut.parameter.shape[0], group))


def _look_up_own_entries(embedding: Any, num_entries: int, group: ProcessGroup) -> None:
    """Make an embedding (batch, seq) -> (batch, seq, dim) leave zero what is not among its entries."""
    forward, size = embedding.forward, embedding.weight.shape[0]
    first = group.rank() * -(-num_entries // group.size())

    def look_up(ids: Tensor) -> Tensor:
        # No rank has an entry beyond the vocabulary: this look-up into nothing is the error that it is on one rank.
        F.embedding(ids, ids.new_zeros(1, 1).expand(num_entries, 1))
        is_here = (ids >= first) & (ids < first + size)
        rows: Tensor = forward((ids - first).where(is_here, 0))
        return rows.masked_fill(~is_here.unsqueeze(-1), 0)

    embedding.forward = look_up


def _join_logits(num_entries: int, group: ProcessGroup) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that gives a head's logits on every rank whole. A loss (0-dim) is one over the whole vocabulary already."""
    largest = -(-num_entries // group.size())

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.ndim == 0:
            return output
        padded = F.pad(output, (0, largest - output.shape[-1]))
        return gather_whole(padded, output.ndim - 1, group)[..., :num_entries]

    return join
