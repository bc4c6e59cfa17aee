"""The gated feed-forward network SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """`w2(silu(w1 x) * w3 x)`; input and output (batch, seq, dim).

    has_bias: add a bias to all three products.
    """

    def __init__(self, dim: int, hidden_dim: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=has_bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=has_bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out
