"""Count the tokens of each expert, and keep the counts even.

All of this runs in backward. So evaluation counts nothing, and recomputed activations count once,
with and without torch.compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_like.util.compile import fused_on_gpu, update_in_backward


@dataclass(frozen=True)
class Balance:
    """Load-balancing settings of an MoE layer.

    method:
        "none": no balancing.
        "bias": each expert has a bias that affects its selection but not its weight
            (arXiv:2408.15664). After each step, the bias rises by `coeff` if the expert's load is
            below the mean, and falls by `coeff` if it is above.
        "sequence": an auxiliary loss over each sequence (arXiv:2412.19437, equations 17 to 20).
        "global": the same loss with the loads of the whole global batch of the step before
            (arXiv:2501.11873).
    coeff: step size of the bias, or weight of the loss.
    z_coeff: weight of the router z-loss, the mean of logsumexp(logits)^2 (arXiv:2202.08906).
    sequence_coeff: with "bias", weight of an additional loss over each sequence; 0: no such loss.
        DeepSeek-V3 was trained with coeff = 1e-3 and sequence_coeff = 1e-4.
    """

    method: str = "none"
    coeff: float = 1e-3
    z_coeff: float = 0.0
    sequence_coeff: float = 0.0

    @property
    def has_sequence_loss(self) -> bool:
        return self.method == "sequence" or self.sequence_coeff > 0

    @property
    def has_loss(self) -> bool:
        """True if backward adds a balance loss, over sequences or the global batch."""
        return self.method == "global" or self.has_sequence_loss

    @property
    def loss_coeff(self) -> float:
        """Weight of the balance loss."""
        return self.sequence_coeff if self.method == "bias" else self.coeff


NO_BALANCE = Balance()


class Sequence(Protocol):
    """The part of each sample that this rank routes. `distributed` replaces `WholeSequence`."""

    def sum(self, counts: Tensor) -> Tensor:
        """Return the sums of `counts` over the ranks that share the samples."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the indices (length,) in the sample of this rank's tokens."""


class WholeSequence:
    """Every token of each sample."""

    def sum(self, counts: Tensor) -> Tensor:
        return counts

    def positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)


WHOLE_SEQUENCE = WholeSequence()


def count_in_backward(x: Tensor, expert_ids: Tensor, counts: Tensor) -> Tensor:
    """Return `x`. Its backward counts the ids and adds the result to `counts`, int64 (experts,)."""
    return cast(Tensor, _CountInBackward.apply(x, expert_ids, counts))


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, expert_ids: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(expert_ids)
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ids = ctx.saved_tensors[0].flatten()
        counts = torch.zeros_like(ctx.counts).scatter_add_(0, ids, torch.ones_like(ids))
        update_in_backward(ctx.counts, counts, grad, "sum")
        return grad, None, None


def sample_fractions(logits: Tensor, top_k: int, sequence: Sequence) -> Tensor:
    """Return each sample's fraction of choices by expert, times the number of experts: 1 if even.

    logits: (batch, seq, experts). The choices are the `top_k` largest scores, without a bias.
    Returns (batch, 1, experts).
    """
    _, expert_ids = torch.topk(logits.detach(), top_k, dim=-1)
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, expert_ids, True)
    counts = sequence.sum(is_chosen.sum(1))
    return load_fractions(counts, logits.dtype).unsqueeze(1)


@fused_on_gpu
def load_fractions(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fraction of all choices by expert (..., experts), times the number of experts."""
    counts = counts.to(torch.float64)
    total = counts.sum(-1, keepdim=True).clamp(min=1)
    return (counts * counts.shape[-1] / total).to(dtype)


def add_router_losses(
    logits: Tensor,
    fractions: Tensor | None,
    scale: Tensor,
    sums: Tensor,
    *,
    coeff: float,
    z_coeff: float,
    score_func: str,
) -> Tensor:
    """Return `logits` (batch, seq, experts). Its backward adds the gradients of the router's losses.

    Let p be the scores of a token divided by their sum, and f the `fractions`. The losses are the
    means over all tokens of `coeff` f.p and of `z_coeff` logsumexp(logits)^2.

    fractions: (batch or 1, 1, experts), or None without a balance loss.
    scale: 0-dim, 1 / the tokens of a step on all ranks.
    sums: (2,) float64; backward adds the sums over tokens of f.p and of logsumexp(logits)^2.
    """
    is_sigmoid = score_func == "sigmoid"
    outputs = _RouterLosses.apply(logits, fractions, scale, sums, coeff, z_coeff, is_sigmoid)
    return cast(Tensor, outputs)


class _RouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        fractions: Tensor | None,
        scale: Tensor,
        sums: Tensor,
        coeff: float,
        z_coeff: float,
        is_sigmoid: bool,
    ) -> Tensor:
        ctx.save_for_backward(logits, fractions, scale)
        ctx.sums = sums
        ctx.coeff = coeff
        ctx.z_coeff = z_coeff
        ctx.is_sigmoid = is_sigmoid
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, fractions, scale = ctx.saved_tensors
        total, sums = _add_loss_gradients(
            grad, logits, fractions, scale, ctx.coeff, ctx.z_coeff, ctx.is_sigmoid
        )
        update_in_backward(ctx.sums, sums, grad, "sum")
        return total, None, None, None, None, None, None


@fused_on_gpu
def _add_loss_gradients(
    grad: Tensor,
    logits: Tensor,
    fractions: Tensor | None,
    scale: Tensor,
    coeff: float,
    z_coeff: float,
    is_sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """Return `grad` plus the gradients of the router's losses, and their sums (2,), float64."""
    z = logits.logsumexp(-1, keepdim=True)
    loss = torch.zeros_like(z)
    if fractions is not None:
        scores = logits.sigmoid() if is_sigmoid else (logits - z).exp()
        shares = scores / (scores.sum(-1, keepdim=True) + 1e-20) if is_sigmoid else scores
        loss = (fractions * shares).sum(-1, keepdim=True)
        slope = shares * (1 - scores) if is_sigmoid else shares
        grad = grad + slope * (fractions - loss) * (coeff * scale)
    if z_coeff:
        grad = grad + 2 * z * (logits - z).exp() * (z_coeff * scale)
    sums = torch.stack([loss.sum(), z.square().sum()])
    return grad, sums.to(torch.float64)
