"""Attention with sinks and sliding windows (gpt-oss, arXiv:2508.10925, section 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.kernels import Core, Kernel, Mask
from torchtitan_like.models.layers.rotary import RotaryEmbedding

# Kernels are fast, or available at all, only for head widths that are multiples of this.
_WIDTH = 8


class Masks(NamedTuple):
    """The masks of layers without and with a window."""

    full: Any
    window: Any


class SinkAttention(Attention):
    """Attention with sinks: each head has a learned score for attending to nothing.

    The softmax of a query covers its keys and the sink, which has no value. So a head's attention
    weights add up to less than 1 (arXiv:2309.17453 keeps the first tokens for this purpose).

    Kernels do not support such a score. So `core` puts the sink in front of all keys (`sink_core`),
    and each head gets one more element. It is 1 in the sink's key, the score in all queries, and 0
    in all other keys. `core` and `mask`: see `Attention`.
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
        width = _width(self.head_dim)
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


def sink_core(kernel: Kernel, head_dim: int, window: int) -> Core:
    """Return the core of a `SinkAttention` of heads of `head_dim`; it receives `Masks` or None.

    window: number of keys that a query attends to, itself included; 0: all.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks | None = None) -> Tensor:
        if masks is not None:
            mask = masks.window if window else masks.full
        elif window:
            num_queries, num_keys = q.shape[2], k.shape[2]
            index = torch.arange(num_keys - num_queries, num_keys, device=q.device)
            mask = kernel.mask(index[None], q.dtype, num_keys, window=window, has_sink=True)
        else:
            mask = None
        ones = k.new_ones(*k.shape[:2], 1, 1)
        sink = F.pad(ones, (head_dim, k.shape[-1] - head_dim - 1))
        k = torch.cat([sink, k], dim=2)
        return kernel.core(q, k, F.pad(v, (0, 0, 1, 0)), mask)

    return attend


def sink_masks(mask: Callable[..., Any], window: int) -> Mask:
    """Return the model's mask for documents; it builds the `Masks` of `sink_core`.

    mask: the mask of the kernel.
    """

    def build(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Masks:
        return Masks(
            full=mask(positions, dtype, num_keys, has_sink=True),
            window=mask(positions, dtype, num_keys, window=window, has_sink=True),
        )

    return build


def _width(head_dim: int) -> int:
    """Return the width of a head with the element of the sink, padded for the kernels."""
    return (head_dim // _WIDTH + 1) * _WIDTH
