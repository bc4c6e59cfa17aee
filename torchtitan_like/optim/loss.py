"""Chunked cross-entropy: the loss of a large vocabulary without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
# On CPU the softmax walks through a chunk in pieces of this many logits, which stay in a core's cache.
TILE = 131_072

SoftmaxBody = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_cross_entropy(
    chunk_mib: int, compile_backend: str | None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A loss (hidden (tokens, dim), weight (vocab, dim), labels (tokens,)) -> 0-dim sum over labels other than -100.

    Logits are made for a few tokens at a time, in the dtype of `hidden`, at most `chunk_mib` MiB of them if they were
    fp32 (0: all tokens at once); their softmax is fp32, or float64 for float64. Each chunk's gradients are taken while
    its logits are there, so that nothing is computed twice; those of the weight are summed over chunks in fp32.
    `compile_backend` compiles what happens between the matrix products.
    """
    body: SoftmaxBody = _softmax_in_tiles
    if compile_backend is not None:
        body = torch.compile(_softmax, backend=compile_backend)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        chunk = _tokens_per_chunk(hidden.shape[0], weight.shape[0], chunk_mib)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, body)
            return total
        return _loss_alone(hidden, weight, labels, chunk)

    return loss


def _tokens_per_chunk(num_tokens: int, vocab_size: int, chunk_mib: int) -> int:
    """The fewest chunks that respect the limit, all of nearly one size."""
    most = max((chunk_mib << 20) // (4 * vocab_size), 1) if chunk_mib else max(num_tokens, 1)
    num_chunks = max(-(-num_tokens // most), 1)
    return max(-(-num_tokens // num_chunks), 1)


def _loss_alone(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for some_hidden, some_labels in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        for tile in _tiles(F.linear(some_hidden, weight), some_labels):
            counts = tile[1] != IGNORED
            losses, _, _ = _losses(tile[0], tile[1].where(counts, 0))
            total += losses.where(counts, 0).sum()
    return total.to(_wide(hidden))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (tokens,) of logits (tokens, vocab) at labels, and their gradients: softmax minus one-hot, rounded once."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=_wide(logits))
    labels = labels.unsqueeze(-1)
    losses = -log_probabilities.gather(-1, labels).squeeze(-1)
    gradients = log_probabilities.exp_().scatter_add_(-1, labels, _minus_one(labels, log_probabilities.dtype))
    return losses, gradients.to(logits.dtype)


def _softmax_in_tiles(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As `_softmax`; on CPU the gradients overwrite the logits and no wide copy of them is ever whole."""
    if not logits.is_cpu:
        return _softmax(logits, labels)
    all_losses = []
    for some_logits, some_labels in _tiles(logits, labels):
        losses, p, total = _losses(some_logits, some_labels)
        index = some_labels.unsqueeze(-1)
        some_logits.copy_(p.mul_(total.reciprocal_()).scatter_add_(-1, index, _minus_one(index, p.dtype)))
        all_losses.append(losses)
    return torch.cat(all_losses), logits


def _tiles(logits: Tensor, labels: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    tokens = max(TILE // logits.shape[-1], 1) if logits.is_cpu else max(len(logits), 1)
    return zip(logits.split(tokens), labels.split(tokens), strict=True)


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (tokens,), softmax (tokens, vocab) and its sum (tokens, 1), by which the softmax is still to be divided.

    Half the time of log_softmax and exp on CPU, and more exact: torch's kernels add up a row one vector after the other,
    which is off by 1e-5 at 128,000 entries. `sum` is not, so it corrects the kernel. The log-sum-exp follows from the
    largest entry: log p_max = logit_max - logsumexp.
    """
    wide = logits.to(_wide(logits))
    p = torch.softmax(wide, dim=-1)
    total = p.sum(-1, keepdim=True)
    log_sum_exp = wide.amax(-1, keepdim=True) - (p.amax(-1, keepdim=True) / total).log_()
    return (log_sum_exp - wide.gather(-1, labels.unsqueeze(-1))).squeeze(-1), p, total


def _minus_one(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(like, -1, dtype=dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients of the sum too; backward only scales them by what comes from above."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, body: SoftmaxBody) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight) if wants_weight and len(hidden) == 0 else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            counts = labels[some] != IGNORED
            losses, d_logits = body(hidden[some] @ weight.t(), labels[some].where(counts, 0))
            total += losses.where(counts, 0).sum()
            # Ignored tokens get no gradient by way of the narrow factors: (tokens, dim) is much less than (tokens, vocab).
            mask = counts.to(hidden.dtype).unsqueeze(-1)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[some]).mul_(mask)
            if wants_weight:
                part = d_logits.t() @ (hidden[some] * mask)
                d_weight = _add(d_weight, part, is_only=chunk >= len(hidden))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total.to(_wide(hidden))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * grad
        if d_weight is not None:
            d_weight = torch.mul(d_weight, grad, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
        return d_hidden, d_weight, None, None, None


def _add(total: Tensor | None, part: Tensor, *, is_only: bool) -> Tensor:
    """`total + part` in fp32 or wider; what is not a sum keeps its dtype."""
    if is_only:
        return part
    return part.to(_wide(part)) if total is None else total.add_(part)
