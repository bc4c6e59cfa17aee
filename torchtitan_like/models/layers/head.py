"""The last module: from hidden states to logits, or straight to the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of token losses in nats over labels other than -100: a 0-dim tensor of fp32, or float64 for a float64 model.

    hidden (tokens, dim), weight (vocab, dim), labels (tokens,).
    """
    logits = F.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")


class OutputHead(nn.Linear):
    """Logits (batch, seq, vocab) of hidden states (batch, seq, dim); with labels (batch, seq) the sum of token losses.

    `loss` is a seam with the signature of `cross_entropy_sum`. Head and loss are one module so that a loss which never
    holds all logits can be put there.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.loss = cross_entropy_sum

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return F.linear(hidden, self.weight)
        return self.loss(hidden.flatten(0, -2), self.weight, labels.flatten())
