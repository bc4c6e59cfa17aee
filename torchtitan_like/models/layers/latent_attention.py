"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.kernels import Core, causal_attention
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate

# Hugging Face's models normalize latents with this epsilon, whatever their rms_norm_eps is.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Map (batch, seq, dim) to the same shape. Keys and values are computed from one small latent.

    A query or key head has a part without position (qk_nope_head_dim) and a rotated part
    (qk_rope_head_dim). All heads share one rotated key, and a value head has v_head_dim elements.

    q_lora_rank: width of the latent of the queries; 0 computes them from the input.
    kv_lora_rank: width of the latent of keys and values.
    scale: factor of the scores in addition to `1 / sqrt(head_dim)`, such as YaRN's.

    `core` and `mask`: see `Attention`. The core receives equal widths, as its kernels require:
    values are padded with zeros.
    """

    core: Core

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rotary: RotaryEmbedding,
        scale: float = 1.0,
        core: Core = causal_attention,
    ) -> None:
        super().__init__()
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.scale = scale
        query_dim = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
        self.has_query_latent = q_lora_rank > 0
        if self.has_query_latent:
            self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_norm = RMSNorm(q_lora_rank, LATENT_EPS)
            self.wq_b = nn.Linear(q_lora_rank, query_dim, bias=False)
        else:
            self.wq = nn.Linear(dim, query_dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank, LATENT_EPS)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_head_dim, dim, bias=False)
        self.rotary = rotary
        self.core = core

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        batch, seq, _ = x.shape
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        cos, sin = self.rotary.tables(seq, positions)
        queries = self.wq_b(self.q_norm(self.wq_a(x))) if self.has_query_latent else self.wq(x)
        # -1: with tensor parallelism a rank computes some of the heads.
        q_nope, q_rope = queries.view(batch, seq, -1, nope + rope).split([nope, rope], dim=-1)
        q_rope = rotate(q_rope, cos, sin, self.rotary.pairs)
        q = torch.cat([q_nope, q_rope], dim=-1)
        if self.scale != 1.0:
            q = q * self.scale
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, rope], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin, self.rotary.pairs)
        expanded = self.wkv_b(self.kv_norm(latent)).view(batch, seq, -1, nope + self.v_head_dim)
        k_nope, v = expanded.split([nope, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        v = F.pad(v, (0, nope + rope - self.v_head_dim))
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        y = y[..., : self.v_head_dim].transpose(1, 2).reshape(batch, seq, -1)
        out: Tensor = self.wo(y)
        return out
