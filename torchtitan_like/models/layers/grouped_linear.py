"""Linear layers of many experts in one call: each group of rows has its own weight.

`torch.nn.functional.grouped_mm` computes them in one kernel where it accepts the tensors.
Otherwise, each group has a separate matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# `grouped_mm` reads rows in units of 16 bytes.
_ROW_BYTES = 16
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `x[r] @ weight[g].T` for each row r, where g is the group of the row.

    x: (rows, in); the rows of a group are adjacent, and the groups are in order.
    weight: (groups, out, in), of x's dtype.
    ends: (groups,) int32: index after the last row of each group. The last one is `rows`.

    Returns (rows, out) in x's dtype.
    """
    out: Tensor = _GroupedLinear.apply(x, weight, ends)
    return out


def add_group_bias(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Return `x[r] + bias[g]` for each row r, where g is the group of the row.

    x: (rows, out), as the output of `grouped_linear`. bias: (groups, out), of x's dtype.
    """
    out: Tensor = _GroupBias.apply(x, bias, ends)
    return out


def has_kernel(dtype: torch.dtype, *sizes: int) -> bool:
    """Return True if `grouped_mm` accepts this dtype and weights with these inner sizes."""
    is_aligned = all(size * dtype.itemsize % _ROW_BYTES == 0 for size in sizes)
    return hasattr(F, "grouped_mm") and dtype in _KERNEL_DTYPES and is_aligned


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _rows_times_groups(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded gradient has no rows in memory
        grad_x = _rows_times_groups(grad, weight, ends) if ctx.needs_input_grad[0] else None
        grad_weight = _group_products(grad, x, ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _GroupBias(torch.autograd.Function):
    """Its backward adds the rows of a group in their order, by a product with ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        rows = torch.arange(x.shape[0], device=x.device)
        return x + bias.index_select(0, torch.searchsorted(ends, rows, right=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (ends,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        # As many columns as `grouped_mm` needs; all are equal.
        ones = grad.new_ones(grad.shape[0], _ROW_BYTES // grad.dtype.itemsize)
        sums = _group_products(grad.contiguous(), ones, ends)
        return grad, sums[..., 0].contiguous(), None


def _rows_times_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(rows, in) times (groups, in, out), group by group: (rows, out)."""
    if torch.compiler.is_compiling():
        return torch.ops.torchtitan_like.rows_times_groups(x, weight, ends)  # type: ignore[no-any-return]
    return _compute_rows(x, weight, ends)


def _group_products(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The product y.T x of the rows of each group: (rows, out), (rows, in) -> (groups, out, in)."""
    if torch.compiler.is_compiling():
        return torch.ops.torchtitan_like.group_products(y, x, ends)  # type: ignore[no-any-return]
    return _compute_products(y, x, ends)


def _compute_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if has_kernel(x.dtype, *weight.shape[1:]):
        return F.grouped_mm(x, weight, offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[group], out=out[start:end])
        start = end
    return out


def _compute_products(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if has_kernel(x.dtype, y.shape[1], x.shape[1]):
        return F.grouped_mm(y.transpose(0, 1), x, offs=ends)
    out = x.new_empty(ends.shape[0], y.shape[1], x.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(y[start:end].transpose(0, 1), x[start:end], out=out[group])
        start = end
    return out


# In a compiled graph the products are opaque: neither the loop nor float32 in `grouped_mm` can be
# traced. Without compiling they are called directly, because the first call of a custom operator
# imports the compiler.
@torch.library.custom_op("torchtitan_like::rows_times_groups", mutates_args=())
def _rows_operator(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _compute_rows(x, weight, ends)


@_rows_operator.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("torchtitan_like::group_products", mutates_args=())
def _products_operator(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return _compute_products(y, x, ends)


@_products_operator.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])
