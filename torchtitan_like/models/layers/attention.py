"""Causal self-attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchtitan_like.models.layers.kernels import Core, causal_attention
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate


class Attention(nn.Module):
    """Input and output (batch, seq, dim).

    `core` is a seam (see `kernels`): it maps q, k, v (batch, heads, seq, head_dim) and a mask to q's shape. `mask` is what
    the model's `mask` seam has made of the positions; None lets each token see all before it.
    """

    core: Core

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, rotary: RotaryEmbedding, core: Core = causal_attention
    ) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.rotary = rotary
        self.core = core

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        batch, seq, _ = x.shape
        # The number of heads is left open: a rank may hold some of them.
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        cos, sin = self.rotary.tables(seq, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out
