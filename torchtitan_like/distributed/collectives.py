"""Differentiable collectives between local tensors: what changes an activation's layout in forward, and back in backward.

Each is a forward and the backward that belongs to it. They return plain tensors that have arrived, run eagerly on any
backend, and are traced by torch.compile into one graph (which puts the waiting where it is due).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The operators that a compiled graph holds too, by the names they have in all supported versions of torch. Their Python
# wrappers change names between versions and return tensors that wait at first use, of a type that must not leak.
_ops = torch.ops._c10d_functional


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x`, equal on every rank, as input of what each rank does alone: its gradients are summed over the ranks."""
    y: Tensor = _CopyTo.apply(x, group)
    return y


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`, equal on every rank; so is its gradient, which is passed on as it is."""
    y: Tensor = _ReduceFrom.apply(x, group)
    return y


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' `x`, one behind the other along `dim`, as input of what each rank does alone.

    In backward the ranks' gradients are summed, and each gets its own slice back.
    """
    y: Tensor = _GatherAlong.apply(x, dim, group)
    return y


def scatter_sum_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice along `dim` of the sum of the ranks' `x`; in backward the slices' gradients are gathered.

    Raises ValueError when the ranks do not divide that dimension, as do the others that cut.
    """
    y: Tensor = _ScatterSumAlong.apply(x, dim, group)
    return y


def gather_whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """As `gather_along` for what every rank then does alike: the gradients are equal, each takes its slice, no sum."""
    y: Tensor = _GatherWhole.apply(x, dim, group)
    return y


def all_to_all_heads_seq(x: Tensor, group: ProcessGroup) -> Tensor:
    """All heads of some tokens -> some heads of all tokens: (batch, heads, seq / n, d) -> (batch, heads / n, seq, d)."""
    y: Tensor = _AllToAll.apply(x, 1, 2, group)
    return y


def all_to_all_seq_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: (batch, heads / n, seq, d) -> (batch, heads, seq / n, d)."""
    y: Tensor = _AllToAll.apply(x, 2, 1, group)
    return y


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_sum(grad, ctx.dim, ctx.group), None, None


class _ScatterSumAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.dim, ctx.group), None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _slice(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, joined: int, group: ProcessGroup) -> Tensor:
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        return _exchange(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.joined, ctx.cut, ctx.group), None, None, None


# ---- the same without gradients. A `chunk` and a `cat` around a collective is the form in which Inductor recognises one
# that is next to a matrix product, for asynchronous tensor parallelism; any other form of these copies it leaves alone.


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return arrived(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    stacked = arrived(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(stacked.chunk(group.size()), dim) if dim else stacked


def _scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    stacked = torch.cat(x.split(_share(x, dim, group), dim)) if dim else x.contiguous()
    return arrived(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


def _exchange(x: Tensor, cut: int, joined: int, group: ProcessGroup) -> Tensor:
    one_each = [1] * group.size()
    pieces = _ops.all_to_all_single(_cut(x, cut, group), one_each, one_each, group.group_name)
    return _join(arrived(pieces), joined)


def _slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    length = _share(x, dim, group)
    return x.narrow(dim, group.rank() * length, length).contiguous()


def arrived(x: Tensor) -> Tensor:
    """What a functional collective has returned, when it is there."""
    y: Tensor = _ops.wait_tensor(x)
    return y


def _cut(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """(ranks, *piece), contiguous: what goes to one rank lies together."""
    pieces: Tensor = x.unflatten(dim, (group.size(), _share(x, dim, group)))
    return pieces.movedim(dim, 0).contiguous()


def _join(pieces: Tensor, dim: int) -> Tensor:
    """(ranks, *piece) -> the pieces one behind the other along `dim`."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def _share(x: Tensor, dim: int, group: ProcessGroup) -> int:
    num_ranks: int = group.size()
    if x.shape[dim] % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks cannot share dimension {dim} of a tensor {tuple(x.shape)} equally: "
            "choose sizes that they divide"
        )
    return x.shape[dim] // num_ranks
