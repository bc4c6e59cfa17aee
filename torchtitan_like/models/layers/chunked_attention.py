"""Attention of Llama 4: rotated layers attend within chunks, the others use no positions.

Hugging Face's `modeling_llama4.py` defines the published models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.kernels import Core
from torchtitan_like.models.layers.norm import normalize
from torchtitan_like.models.layers.rotary import RotaryEmbedding, rotate


class Temperature(NamedTuple):
    """Factor of the queries at position p: `1 + scale log(1 + floor((p + 1) / interval))`.

    It keeps attention over long sequences sharp (arXiv:2501.19399).
    """

    scale: float
    interval: int

    def factors(self, positions: Tensor) -> Tensor:
        """Return the factors at positions (...) in fp32."""
        return 1 + self.scale * torch.log1p(((positions + 1) // self.interval).float())


class RotatedAttention(Attention):
    """Attention that rotates neighboring elements, then normalizes queries and keys without weights.

    norm_eps: epsilon of the normalization; 0: no normalization. `core` and `mask`: see `Attention`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        core: Core,
        norm_eps: float,
    ) -> None:
        super().__init__(dim, n_heads, n_kv_heads, head_dim, rotary, core)
        self.norm_eps = norm_eps

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary.tables(q.shape[1], positions)
        q = rotate(q, cos, sin, pairs="neighbors")
        k = rotate(k, cos, sin, pairs="neighbors")
        if not self.norm_eps:
            return q, k
        return normalize(q, self.norm_eps), normalize(k, self.norm_eps)


class UnrotatedAttention(Attention):
    """Attention without rotation (NoPE, arXiv:2305.19466).

    temperature: factors of the queries; None: no factors.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        core: Core,
        temperature: Temperature | None,
    ) -> None:
        super().__init__(dim, n_heads, n_kv_heads, head_dim, rotary, core)
        self.temperature = temperature

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.temperature is None:
            return q, k
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        return (q * self.temperature.factors(positions)[..., None, None]).to(q.dtype), k
