"""Weights that a narrower type cannot hold: they would be infinite in the file, without an error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger()


def warn_of_overflow(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Log the floating-point ones among `tensors` whose part on this rank has numbers beyond the range of `dtype`."""
    if dtype is None or not dtype.is_floating_point:
        return
    names = [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and _overflows(tensor, dtype)
    ]
    if names:
        logger.warning(
            f"{len(names)} tensors hold numbers that {str(dtype).removeprefix('torch.')} does not reach (its largest is "
            f"{torch.finfo(dtype).max:g}), and that become infinite: {', '.join(names)}. bfloat16 and float32 reach them"
        )


def _overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    # bfloat16 reaches as far as float32, but for half a percent: not worth reading all weights once more.
    if (
        not local.is_floating_point()
        or not local.numel()
        or torch.finfo(local.dtype).max < 2 * torch.finfo(dtype).max
    ):
        return False
    return bool(torch.stack(torch.aminmax(local)).to(dtype).isinf().any())
