"""Layers that attend to a part of the sequence: within a window (with sinks), or within a chunk.

A model may mix such layers with layers that attend to all tokens. `kernels` defines both limits.
gpt-oss (arXiv:2508.10925, section 2) has windows and sinks. Llama 4 has chunks in its rotated
layers, and no positions in the others; Hugging Face's `modeling_llama4.py` defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.kernels import Core, Mask
from torchtitan_like.models.layers.norm import normalize
from torchtitan_like.models.layers.rotary import RotaryEmbedding

# Kernels are fast, or available at all, only for head widths that are multiples of this.
_WIDTH = 8


class Masks(NamedTuple):
    """The masks of layers that attend to all tokens, and of layers with a limit."""

    full: Any
    local: Any


def local_core(core: Core, *, is_local: bool, sink_index: int | None = None) -> Core:
    """Return the core of one layer of a model with limits.

    It receives the model's `Masks`; None: no sequence is longer than the limit.

    is_local: the layer has the limit, and uses the mask of these layers.
    sink_index: the element of a head that is the sink's (`SinkAttention`); None: no sink.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks | None = None) -> Tensor:
        mask = None
        if masks is not None:
            mask = masks.local if is_local else masks.full
        if sink_index is not None:
            ones = k.new_ones(*k.shape[:2], 1, 1)
            sink = F.pad(ones, (sink_index, k.shape[-1] - sink_index - 1))
            k = torch.cat([sink, k], dim=2)
            v = F.pad(v, (0, 0, 1, 0))
        return core(q, k, v, mask)

    return attend


def local_masks(
    mask: Callable[..., Any],
    *,
    by_document: bool,
    window: int = 0,
    chunk: int = 0,
    has_sink: bool = False,
) -> Mask:
    """Return the model's mask; it builds the `Masks` of all layers once per forward pass.

    mask: the mask of the kernel. by_document: attention ends at document borders. Otherwise only
    the number of positions matters, and layers without a limit need no mask.
    """
    limit = window or chunk
    options = {"window": window, "chunk": chunk, "has_sink": has_sink}

    def build(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Masks:
        is_unlimited = not limit or num_keys <= limit
        if by_document:
            full = mask(positions, dtype, num_keys, has_sink=has_sink)
            local = full if is_unlimited else mask(positions, dtype, num_keys, **options)
            return Masks(full, local)
        if is_unlimited and not has_sink:
            return Masks(None, None)
        index = torch.arange(num_keys - positions.shape[1], num_keys, device=positions.device)
        return Masks(None, mask(index[None], dtype, num_keys, **options))

    return build


class SinkAttention(Attention):
    """Attention with sinks: each head has a learned score for attending to nothing.

    The softmax of a query covers its keys and the sink, which has no value. So a head's attention
    weights add up to less than 1 (arXiv:2309.17453 keeps the first tokens for this purpose).

    Kernels do not support such a score. So `core` puts the sink in front of all keys (`local_core`
    with sink_index = head_dim), and each head gets one more element. It is 1 in the sink's key, the
    score in all queries, and 0 in all other keys. `core` and `mask`: see `Attention`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        core: Core,
    ) -> None:
        super().__init__(
            dim, n_heads, n_kv_heads, head_dim, rotary, core, qkv_bias=True, output_bias=True
        )
        self.sinks = nn.Parameter(torch.empty(n_heads))

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.project(x)
        q, k = self.add_positions(q, k, positions)
        width = (self.head_dim // _WIDTH + 1) * _WIDTH  # with the sink's element
        padding = (0, width - self.head_dim)
        # The kernel divides scores by the root of the width.
        sinks = self.sinks
        scores = sinks.to(torch.promote_types(sinks.dtype, torch.float32)) * math.sqrt(width)
        scores = F.pad(scores[:, None], (0, padding[1] - 1)).to(q.dtype).expand(batch, seq, -1, -1)
        q = torch.cat([q * math.sqrt(width / self.head_dim), scores], dim=-1)
        k = F.pad(k, padding)
        v = F.pad(v, padding)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        y = y[..., : self.head_dim].transpose(1, 2).reshape(batch, seq, -1)
        out: Tensor = self.wo(y)
        return out


class RotatedAttention(Attention):
    """Attention that normalizes queries and keys after the rotation, without weights.

    arguments: of `Attention`. norm_eps: epsilon of the normalization.
    """

    def __init__(self, *arguments: Any, norm_eps: float) -> None:
        super().__init__(*arguments)
        self.norm_eps = norm_eps

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k = super().add_positions(q, k, positions)
        return normalize(q, self.norm_eps), normalize(k, self.norm_eps)


class UnrotatedAttention(Attention):
    """Attention without rotation (NoPE, arXiv:2305.19466), whose queries may have a temperature.

    The factor of the query at position p is `1 + attn_scale log(1 + floor((p + 1) / floor_scale))`.
    It keeps attention over long sequences sharp (arXiv:2501.19399).

    arguments: of `Attention`. attn_scale: 0 switches the factors off. floor_scale: in tokens.
    """

    def __init__(self, *arguments: Any, attn_scale: float, floor_scale: int) -> None:
        super().__init__(*arguments)
        self.attn_scale = attn_scale
        self.floor_scale = floor_scale

    def add_positions(
        self, q: Tensor, k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not self.attn_scale:
            return q, k
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        intervals = ((positions + 1) // self.floor_scale).float()
        factors = 1 + self.attn_scale * torch.log1p(intervals)
        return (q * factors[..., None, None]).to(q.dtype), k
