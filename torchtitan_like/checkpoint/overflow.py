"""Warn about weights that overflow to infinity when they are converted to a smaller dtype."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_like.util.shards import local_shard

logger = logging.getLogger()


def warn_of_overflow(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Log the floating-point tensors whose local shard has numbers beyond the range of `dtype`."""
    if dtype is None or not dtype.is_floating_point:
        return
    names = [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and _overflows(tensor, dtype)
    ]
    if names:
        logger.warning(
            f"{len(names)} tensors overflow to infinity in {str(dtype).removeprefix('torch.')}: "
            f"{', '.join(names)}. Expected numbers up to {torch.finfo(dtype).max:g}. Use "
            "bfloat16 or float32"
        )


def _overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    local = local_shard(tensor)
    # bfloat16 has nearly the range of float32. A check would read all weights for half a percent.
    if (
        not local.is_floating_point()
        or not local.numel()
        or torch.finfo(local.dtype).max < 2 * torch.finfo(dtype).max
    ):
        return False
    return bool(torch.stack(torch.aminmax(local)).to(dtype).isinf().any())
