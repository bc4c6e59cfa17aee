"""Causal self-attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v where no token sees a later one; (batch, heads, seq, head_dim) each.

    k and v may have fewer heads, each then serves a group of neighbouring query heads.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # CUDA's flash kernel takes groups but only half precision; the one for fp32 wants equal heads.
        group_size = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Input and output (batch, seq, dim). `core` is a seam: it maps q, k, v (batch, heads, seq, head_dim) to q's shape."""

    core: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.rotary = rotary
        self.core = causal_attention

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        # The number of heads is left open: a rank may hold some of them.
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        cos, sin = self.rotary.tables(seq, positions)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out
