"""Differentiable collectives on local tensors, each with a matching backward.

They wait for the result and return plain tensors. They run eagerly on any backend, and
torch.compile traces them into one graph, in which it moves the waits to where results are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Local = Callable[[Tensor, ProcessGroup, int], Tensor]

# These operators have the same names in all supported versions of torch. Their Python wrappers
# change names between versions, and return tensors of a type that waits at first use.
_ops = torch.ops._c10d_functional


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity in forward, all-reduce in backward (Megatron's *f*, arXiv:1909.08053 section 3)."""
    return _apply(x, _identity, _sum, group)


def add_once(x: Tensor, group: ProcessGroup) -> Tensor:
    """x on the first rank and zeros on the others in forward, identity in backward.

    For a bias that every rank adds before the ranks' results are summed. Each rank then has the
    whole gradient of the sum, so that no collective is needed. An all-reduce would hang: where a
    rank's gradient is known to be zero, torch.compile moves the all-reduce into forward, on this
    rank only.
    """
    return _apply(x, _on_first_rank, _identity, group)


def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce in forward, identity in backward (Megatron's *g*, arXiv:1909.08053 section 3)."""
    return _apply(x, _sum, _identity, group)


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim` in forward, reduce-scatter (sum) in backward.

    For a result that each rank uses differently.
    """
    return _apply(x, _gather, _reduce_scatter, group, dim)


def scatter_sum_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Reduce-scatter (sum) along `dim` in forward, all-gather in backward.

    Raises ValueError if the number of ranks does not divide that dimension, like all functions here
    that split one.
    """
    return _apply(x, _reduce_scatter, _gather, group, dim)


def gather_whole(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim` in forward, this rank's slice in backward.

    For a result that every rank uses equally, so that their gradients are equal.
    """
    return _apply(x, _gather, _slice, group, dim)


def all_to_all_heads_seq(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from sequence shards to head shards.

    (batch, heads, seq / n, d) -> (batch, heads / n, seq, d).
    """
    return _apply(x, _scatter_heads, _gather_heads, group)


def all_to_all_seq_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from head shards to sequence shards.

    (batch, heads / n, seq, d) -> (batch, heads, seq / n, d).
    """
    return _apply(x, _gather_heads, _scatter_heads, group)


def start_exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-to-all of x (ranks, *slice): slice i goes to rank i. `arrived` waits for it.

    Has no gradient.
    """
    one_each = [1] * group.size()
    result: Tensor = _ops.all_to_all_single(x.contiguous(), one_each, one_each, group.group_name)
    return result


def exchange_rows(
    rows: Tensor, num_sent: list[int], num_received: list[int], group: ProcessGroup
) -> Tensor:
    """All-to-all of rows (rows, dim) in forward, and of their gradients back in backward.

    num_sent: rows for each rank, in rank order. num_received: rows from each rank.

    Returns (sum of num_received, dim), in the order of the ranks that sent them.
    """
    received: Tensor = _ExchangeRows.apply(rows, num_sent, num_received, group)
    return received


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        num_sent: list[int],
        num_received: list[int],
        group: ProcessGroup,
    ) -> Tensor:
        ctx.num_sent = num_sent
        ctx.num_received = num_received
        ctx.group = group
        return _send_rows(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send_rows(grad, ctx.num_received, ctx.num_sent, ctx.group), None, None, None


def start_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-to-all of rows (rows, dim), as many to each rank. `finish_rows` waits for it.

    Their gradients go back in backward, which waits only where the gradient of `rows` is needed.
    """
    started: Tensor = _StartRows.apply(rows, group)
    return started


def finish_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Wait for the rows of `start_rows`: (rows, dim), in the order of the ranks that sent them."""
    received: Tensor = _FinishRows.apply(rows, group)
    return received


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        return _start_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return arrived(grad), None


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return arrived(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _start_rows(grad, ctx.group), None


def _start_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    sizes = [rows.shape[0] // group.size()] * group.size()
    started: Tensor = _ops.all_to_all_single(rows.contiguous(), sizes, sizes, group.group_name)
    return started


def _send_rows(
    rows: Tensor, num_sent: list[int], num_received: list[int], group: ProcessGroup
) -> Tensor:
    name = group.group_name
    return arrived(_ops.all_to_all_single(rows.contiguous(), num_received, num_sent, name))


def _apply(
    x: Tensor, collective: Local, adjoint: Local, group: ProcessGroup, dim: int = 0
) -> Tensor:
    """Return `collective(x, group, dim)`, whose gradient is `adjoint(gradient, group, dim)`."""
    y: Tensor = _Collective.apply(x, collective, adjoint, group, dim)
    return y


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collective: Local, adjoint: Local, group: ProcessGroup, dim: int
    ) -> Tensor:
        ctx.adjoint = adjoint
        ctx.group = group
        ctx.dim = dim
        return collective(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.adjoint(grad, ctx.group, ctx.dim), None, None, None, None


# ---- the collectives without gradients
#
# For asynchronous tensor parallelism, Inductor recognizes a collective next to a matrix product
# only if a `chunk` and a `cat` surround it. Do not write these copies in another form.


def _identity(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


def _on_first_rank(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x) if group.rank() == 0 else torch.zeros_like(x)


def _sum(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return arrived(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    stacked = arrived(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(stacked.chunk(group.size()), dim) if dim else stacked


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    stacked = torch.cat(x.split(_slice_size(x, dim, group), dim)) if dim else x.contiguous()
    return arrived(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


def _scatter_heads(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _exchange(x, 1, 2, group)


def _gather_heads(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _exchange(x, 2, 1, group)


def _exchange(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
    one_each = [1] * group.size()
    # (ranks, *slice), contiguous: the values for one rank are adjacent.
    shape = (group.size(), _slice_size(x, scatter_dim, group))
    by_rank = x.unflatten(scatter_dim, shape).movedim(scatter_dim, 0)
    exchanged = _ops.all_to_all_single(by_rank.contiguous(), one_each, one_each, group.group_name)
    return arrived(exchanged).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    length = _slice_size(x, dim, group)
    return x.narrow(dim, group.rank() * length, length).contiguous()


def arrived(x: Tensor) -> Tensor:
    """Wait for the result of a functional collective and return it."""
    y: Tensor = _ops.wait_tensor(x)
    return y


def _slice_size(x: Tensor, dim: int, group: ProcessGroup) -> int:
    num_ranks: int = group.size()
    if x.shape[dim] % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks cannot share dimension {dim} of a tensor {tuple(x.shape)} equally: "
            "expected a multiple of the number of ranks; change that size or the degree"
        )
    return x.shape[dim] // num_ranks
