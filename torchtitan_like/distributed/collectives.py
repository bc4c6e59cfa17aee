"""Differentiable collectives between local tensors: what changes an activation's layout in forward, and back in backward.

Each is a forward and the backward that belongs to it. They return plain tensors that have arrived, run eagerly on any
backend, and are traced by torch.compile into one graph (which puts the waiting where it is due).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Local = Callable[[Tensor, ProcessGroup, int], Tensor]

# The operators that a compiled graph holds too, by the names they have in all supported versions of torch. Their Python
# wrappers change names between versions and return tensors that wait at first use, of a type that must not leak.
_ops = torch.ops._c10d_functional


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x`, equal on every rank, as input of what each rank does alone: its gradients are summed over the ranks."""
    return _apply(x, _same, _sum, group)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`, equal on every rank; so is its gradient, which is passed on as it is."""
    return _apply(x, _sum, _same, group)


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' `x`, one behind the other along `dim`, as input of what each rank does alone.

    In backward the ranks' gradients are summed, and each gets its own slice back.
    """
    return _apply(x, _gather, _scatter_sum, group, dim)


def scatter_sum_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice along `dim` of the sum of the ranks' `x`; in backward the slices' gradients are gathered.

    Raises ValueError when the ranks do not divide that dimension, as do the others that cut.
    """
    return _apply(x, _scatter_sum, _gather, group, dim)


def gather_whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """As `gather_along` for what every rank then does alike: the gradients are equal, each takes its slice, no sum."""
    return _apply(x, _gather, _slice, group, dim)


def all_to_all_heads_seq(x: Tensor, group: ProcessGroup) -> Tensor:
    """All heads of some tokens -> some heads of all tokens: (batch, heads, seq / n, d) -> (batch, heads / n, seq, d)."""
    return _apply(x, _cut_heads, _join_heads, group)


def all_to_all_seq_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: (batch, heads / n, seq, d) -> (batch, heads, seq / n, d)."""
    return _apply(x, _join_heads, _cut_heads, group)


def _apply(x: Tensor, there: Local, back: Local, group: ProcessGroup, dim: int = 0) -> Tensor:
    """`there(x, group, dim)`, whose gradient is `back(gradient, group, dim)`."""
    y: Tensor = _ThereAndBack.apply(x, there, back, group, dim)
    return y


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Local, back: Local, group: ProcessGroup, dim: int) -> Tensor:
        ctx.back, ctx.group, ctx.dim = back, group, dim
        return there(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None


# ---- the same without gradients, all called alike. A `chunk` and a `cat` around a collective is the form in which Inductor
# recognises one that is next to a matrix product, for asynchronous tensor parallelism; any other form of these copies it
# leaves alone.


def _same(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return arrived(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    stacked = arrived(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(stacked.chunk(group.size()), dim) if dim else stacked


def _scatter_sum(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    stacked = torch.cat(x.split(_share(x, dim, group), dim)) if dim else x.contiguous()
    return arrived(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


def _cut_heads(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _exchange(x, 1, 2, group)


def _join_heads(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _exchange(x, 2, 1, group)


def _exchange(x: Tensor, cut: int, joined: int, group: ProcessGroup) -> Tensor:
    one_each = [1] * group.size()
    # (ranks, *piece), contiguous: what goes to one rank lies together.
    pieces = x.unflatten(cut, (group.size(), _share(x, cut, group))).movedim(cut, 0)
    exchanged = _ops.all_to_all_single(pieces.contiguous(), one_each, one_each, group.group_name)
    return arrived(exchanged).movedim(0, joined).flatten(joined, joined + 1)


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    length = _share(x, dim, group)
    return x.narrow(dim, group.rank() * length, length).contiguous()


def arrived(x: Tensor) -> Tensor:
    """What a functional collective has returned, when it is there."""
    y: Tensor = _ops.wait_tensor(x)
    return y


def _share(x: Tensor, dim: int, group: ProcessGroup) -> int:
    num_ranks: int = group.size()
    if x.shape[dim] % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks cannot share dimension {dim} of a tensor {tuple(x.shape)} equally: "
            "choose sizes that they divide"
        )
    return x.shape[dim] // num_ranks
