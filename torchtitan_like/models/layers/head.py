"""Output head: hidden states to logits, or to the sum of token losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.util.labels import IGNORED_LABEL


class LossWithTokens(NamedTuple):
    """A loss and its parts. total: 0-dim sum of the token losses, differentiable. tokens: the loss of
    each token, (tokens,), detached; 0 for an ignored label."""

    total: Tensor
    tokens: Tensor


class LossWithMTP(NamedTuple):
    """The loss of a model with multi-token prediction.

    own: the loss of the next token. mtp: 0-dim sum of the token losses of each depth, mean over
    depths, differentiable. weight: factor of `mtp` in the loss that training minimizes.
    """

    own: Tensor | LossWithTokens
    mtp: Tensor
    weight: float


def total_of(loss: Tensor | LossWithTokens) -> Tensor:
    """Return the sum of a loss that may come with its token losses."""
    return loss.total if isinstance(loss, LossWithTokens) else loss


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the 0-dim sum of token losses in nats over labels other than -100.

    hidden (tokens, dim), weight (vocab, dim), labels (tokens,). The result is fp32, or float64 for
    a float64 model.
    """
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


class OutputHead(nn.Linear):
    """Map hidden states (batch, seq, dim) to logits (batch, seq, vocab), or to the loss.

    With labels (batch, seq) it returns the sum of token losses. With `mtp_labels` of n depths,
    `hidden` has n + 1 batches along dimension 0, and the result is a list of n + 1 losses.

    `loss` is a seam with the signature of `cross_entropy_sum`: a replacement need not hold all
    logits at a time. It returns the sum, or a `LossWithTokens` if the trainer needs token losses.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor | LossWithTokens]

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.loss = cross_entropy_sum

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, mtp_labels: Sequence[Tensor] = ()
    ) -> Tensor | LossWithTokens | list[Tensor | LossWithTokens]:
        if labels is None:
            return F.linear(hidden, self.weight)
        if not mtp_labels:
            return self.loss(hidden.flatten(0, -2), self.weight, labels.flatten())
        weight = self.weight  # read once: each read may cast it
        by_depth = zip(hidden.chunk(1 + len(mtp_labels)), [labels, *mtp_labels], strict=True)
        return [self.loss(h.flatten(0, -2), weight, each.flatten()) for h, each in by_depth]
