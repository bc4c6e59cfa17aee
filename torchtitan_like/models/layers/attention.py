"""Causal self-attention with grouped key and value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchtitan_like.models.layers.kernels import Core, causal_attention
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate


class Attention(nn.Module):
    """Map (batch, seq, dim) to the same shape.

    `core` is a seam (see `kernels`): it maps q, k, v (batch, heads, seq, head_dim) and a mask to
    the shape of q. `mask` is the output of the model's `attention_mask` seam; None makes attention
    plainly causal.

    qkv_bias, output_bias: add a bias to queries, keys, and values; to the output.
    qk_norm_eps: epsilon of norms of each head's queries and keys, before their rotation
        (arXiv:2302.05442); None: no norms.
    """

    core: Core

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        core: Core = causal_attention,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=output_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.rotary = rotary
        self.core = core

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, and values (batch, seq, heads, head_dim) before the rotation."""
        batch, seq, _ = x.shape
        # -1: with tensor parallelism a rank computes some of the heads.
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys with position information, here by rotation."""
        cos, sin = self.rotary.tables(q.shape[1], positions)
        pairs = self.rotary.pairs
        return rotate(q, cos, sin, pairs), rotate(k, cos, sin, pairs)

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.project(x)
        q, k = self.add_positions(q, k, positions)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out
