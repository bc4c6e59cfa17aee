"""Linear layers of many experts in one call: each group of rows has its own weight.

`select_product` chooses what computes them in this process:

| name | matrix products |
| --- | --- |
| `kernel` | one `torch.nn.functional.grouped_mm` |
| `padded` | the same, with zeros that fill each group to 16, 32, ... rows; none is empty |
| `loop` | one for each group |
| `auto` | `kernel` where `grouped_mm` accepts the tensors, else `loop` |

`grouped_mm` requires (torch 2.13, `_meta_grouped_mm_common` in torch/_meta_registrations.py):
rows and the rows of its result start at multiples of 16 bytes; of the last two strides one is 1.
It writes no row after the last end (pytorch/pytorch#154557). Such rows of `x` are padding: what is
computed for them is arbitrary, and no row, weight or bias of a group gets a part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtitan_like.util.compile import fused_on_gpu

# `grouped_mm` reads rows in units of 16 bytes.
_ROW_BYTES = 16
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PADDED_ROWS = 16
_selected = "auto"


def select_product(name: str) -> None:
    """Choose what computes the products in this process; see above."""
    global _selected
    _selected = name


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `x[r] @ weight[g].T` for each row r, where g is the group of the row.

    x: (rows, in); the rows of a group are adjacent, and the groups are in order.
    weight: (groups, out, in), of x's dtype.
    ends: (groups,) int32: index after the last row of each group. Rows after the last one are padding.

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


def product_of(dtype: torch.dtype, *sizes: int) -> str:
    """Return what computes weights of this dtype and these inner sizes: a name of the table above.

    "loop" where `grouped_mm` does not accept them.
    """
    is_aligned = all(size * dtype.itemsize % _ROW_BYTES == 0 for size in sizes)
    if not (hasattr(F, "grouped_mm") and dtype in _KERNEL_DTYPES and is_aligned):
        return "loop"
    return "kernel" if _selected == "auto" else _selected


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
        return _add_bias_of_group(x, bias, ends)

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


@fused_on_gpu
def _add_bias_of_group(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    groups = torch.searchsorted(ends, rows, right=True)
    return x + bias.index_select(0, groups.clamp(max=bias.shape[0] - 1))


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
    product = product_of(x.dtype, *weight.shape[1:])
    if product == "kernel":
        return F.grouped_mm(x.contiguous(), weight, offs=ends)
    if product == "padded":
        padding = _Padding(ends, x.shape[0])
        return padding.remove(F.grouped_mm(padding.add(x), weight, offs=padding.ends))
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[group], out=out[start:end])
        start = end
    return out


class _Padding:
    """Zeros that fill each group to a multiple of 16 rows, at least 16. Does not wait for the device.

    ends: (groups,) int32, index after the last row of each padded group.
    """

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        sizes = ends.diff(prepend=ends.new_zeros(1))
        padded = (sizes.clamp(min=1) + _PADDED_ROWS - 1) // _PADDED_ROWS * _PADDED_ROWS
        self.ends = padded.cumsum(0).to(torch.int32)
        rows = torch.arange(num_rows, device=ends.device)
        groups = torch.searchsorted(ends, rows, right=True)
        shifts = (self.ends - padded) - (ends - sizes)
        # Rows after the last end go behind the last group.
        shifts = torch.cat([shifts, self.ends[-1:] - ends[-1:]])
        self._positions = rows + shifts.index_select(0, groups)
        # The most that any sizes need. `grouped_mm` ignores rows after the last end.
        self._num_rows = num_rows + ends.shape[0] * _PADDED_ROWS

    def add(self, x: Tensor) -> Tensor:
        """Copy rows (rows, size) into the padded groups."""
        return x.new_zeros(self._num_rows, x.shape[1]).index_copy_(0, self._positions, x)

    def remove(self, x: Tensor) -> Tensor:
        """Copy the rows of the groups out of padded ones."""
        return x.index_select(0, self._positions)


def _compute_products(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    product = product_of(x.dtype, y.shape[1], x.shape[1])
    if product == "padded":
        padding = _Padding(ends, x.shape[0])
        y, x, ends = padding.add(y), padding.add(x), padding.ends
    if product != "loop":
        return F.grouped_mm(y.contiguous().transpose(0, 1), x.contiguous(), offs=ends)
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
