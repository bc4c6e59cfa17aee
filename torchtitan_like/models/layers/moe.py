"""Mixture of experts: a router sends each token to its top-k experts, and no token is dropped.

Tokens are gathered into rows, sorted by expert. The experts compute their rows, and a token's
results are gathered again and added in the order of its scores. Forward and backward gather only.
So the order of every addition is the same on every layout.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtitan_like.models.layers.grouped_linear import grouped_linear, has_kernel


class Router(nn.Module):
    """Choose `top_k` experts for each token, and their weights in the combination.

    score_func: "softmax" over the experts' logits, or "sigmoid" of each logit.
    normalize: divide the weights of a token by their sum.
    scale: factor of the weights.

    Scores are computed in fp32 (float64 for a float64 model) whatever the compute dtype is: rounded
    scores would send tokens to other experts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: Literal["softmax", "sigmoid"],
        normalize: bool,
        scale: float,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.top_k = top_k
        self.score_func = score_func
        self.normalize = normalize
        self.scale = scale

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens (tokens, dim) to weights (tokens, top_k) and expert ids (tokens, top_k), best first."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        logits = F.linear(tokens.to(dtype), self.gate.weight.to(dtype))
        selected, expert_ids = torch.topk(logits, self.top_k, dim=-1)  # both score functions rise
        if self.score_func == "softmax" and self.normalize:
            weights = selected.softmax(-1)  # the softmax over all experts, divided by the sum
        elif self.score_func == "softmax":
            weights = (selected - logits.logsumexp(-1, keepdim=True)).exp()
        else:
            weights = selected.sigmoid()
            if self.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, expert_ids


class Experts(nn.Module):
    """The experts' SwiGLU networks with stacked weights.

    w1 and w3 (experts, hidden_dim, dim), w2 (experts, dim, hidden_dim).
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map rows (rows, dim), sorted by expert, to the same shape.

        ends: (experts,) int32, index after the last row of each expert.
        """
        hidden = F.silu(grouped_linear(rows, self.w1, ends)) * grouped_linear(rows, self.w3, ends)
        return grouped_linear(hidden, self.w2, ends)


class MoE(nn.Module):
    """Map (batch, seq, dim) to the weighted sum of each token's experts, plus the shared experts."""

    def __init__(self, router: Router, experts: Experts, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, expert_ids = self.router(tokens)
        routes = sort_by_expert(expert_ids, self.experts.w1.shape[0])
        rows = dispatch(tokens, routes)
        out = combine(self.experts(rows, routes.ends), weights, routes).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def describe_experts(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the log line on the experts' matrix products in `dtype`; empty for a dense model."""
    experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
    if experts is None:
        return []
    num_experts, *sizes = experts.w1.shape
    kernel = "grouped_mm" if has_kernel(dtype, *sizes) else "a loop over experts"
    return [f"Experts: {num_experts} in each layer, computed by {kernel} in {dtype}"]


class Routes(NamedTuple):
    """Where each token's rows are. A row is one token on its way to one expert.

    token_of_row: (rows,) index of the token.
    slot_of_row: (rows,) index into the flattened (tokens, top_k) choices.
    row_of_slot: (tokens, top_k) index of the row; the inverse of `slot_of_row`.
    ends: (experts,) int32, index after the last row of each expert.
    """

    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    ends: Tensor


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> Routes:
    """Sort the choices (tokens, top_k) by expert; an expert's rows keep the order of the tokens."""
    sorted_ids, slot_of_row = expert_ids.flatten().sort(stable=True)
    indices = torch.arange(slot_of_row.shape[0], device=expert_ids.device)
    row_of_slot = torch.empty_like(slot_of_row).scatter(0, slot_of_row, indices)
    experts = torch.arange(num_experts, device=expert_ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    return Routes(
        token_of_row=slot_of_row // expert_ids.shape[1],
        slot_of_row=slot_of_row,
        row_of_slot=row_of_slot.view_as(expert_ids),
        ends=ends,
    )


def dispatch(tokens: Tensor, routes: Routes) -> Tensor:
    """Copy tokens (tokens, dim) to rows (rows, dim)."""
    rows: Tensor = _Dispatch.apply(tokens, routes.token_of_row, routes.row_of_slot)
    return rows


def combine(rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """Return each token's sum of its rows times weights (tokens, top_k): (tokens, dim).

    Sums are accumulated in the dtype of the weights and rounded once.
    """
    out: Tensor = _Combine.apply(
        rows, weights, routes.token_of_row, routes.slot_of_row, routes.row_of_slot
    )
    return out


class _Dispatch(torch.autograd.Function):
    """A plain gather. Its backward adds each token's gradients in the order of its scores.

    Autograd's own backward of a gather scatters, in an order that no one defines.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum_of_slots(grad, row_of_slot, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        token_of_row: Tensor,
        slot_of_row: Tensor,
        row_of_slot: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, token_of_row, slot_of_row, row_of_slot)
        return _sum_of_slots(rows, row_of_slot, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, token_of_row, slot_of_row, row_of_slot = ctx.saved_tensors
        grad_of_row = grad.index_select(0, token_of_row).to(weights.dtype)
        weight_of_row = weights.flatten().index_select(0, slot_of_row)
        grad_weights = (rows.to(weights.dtype) * grad_of_row).sum(-1)
        grad_rows = (grad_of_row * weight_of_row[:, None]).to(rows.dtype)
        return grad_rows, grad_weights[row_of_slot], None, None, None


def _sum_of_slots(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Add each token's rows, times their weights: (rows, dim) -> (tokens, dim) in rows' dtype."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(row_of_slot.shape[0], rows.shape[1], dtype=dtype)
    for slot in range(row_of_slot.shape[1]):
        row = rows.index_select(0, row_of_slot[:, slot]).to(dtype)
        total = (
            total + row if weights is None else torch.addcmul(total, row, weights[:, slot, None])
        )
    if total.dtype == rows.dtype:
        return total  # torch 2.11 compiles `to` without a change of dtype to a wrong gradient
    return total.to(rows.dtype)
