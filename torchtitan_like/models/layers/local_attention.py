"""Cores of layers that attend to a part of the sequence only: a sliding window, or a chunk.

A model may mix such layers with layers that attend to all tokens. `kernels` defines both limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.models.layers.kernels import Core, Kernel, Mask


class Masks(NamedTuple):
    """The masks of layers that attend to all tokens, and of layers with a limit."""

    full: Any
    local: Any


def local_core(kernel: Kernel, *, window: int = 0, chunk: int = 0) -> Core:
    """Return the core of one layer of a model with limits; it receives `Masks` or None.

    window: number of keys that a query attends to, itself included; 0: all.
    chunk: number of tokens that attend to each other; 0: all.
    """
    limit = window or chunk

    def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks | None = None) -> Tensor:
        num_queries, num_keys = q.shape[2], k.shape[2]
        mask = None
        if masks is not None:
            mask = masks.local if limit else masks.full
        elif limit and num_keys > limit:
            index = torch.arange(num_keys - num_queries, num_keys, device=q.device)
            mask = kernel.mask(index[None], q.dtype, num_keys, window=window, chunk=chunk)
        return kernel.core(q, k, v, mask)

    return attend


def local_masks(mask: Callable[..., Any], *, window: int = 0, chunk: int = 0) -> Mask:
    """Return the model's mask for documents; it builds the `Masks` of `local_core`.

    mask: the mask of the kernel.
    """

    def build(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Masks:
        full = mask(positions, dtype, num_keys)
        if num_keys <= (window or chunk):
            return Masks(full, full)
        return Masks(full, mask(positions, dtype, num_keys, window=window, chunk=chunk))

    return build
