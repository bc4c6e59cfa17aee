"""Stochastic rounding to bfloat16 whose random bits are a function, equal on every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_like.util.splitmix import SIGNED_GAMMA, scramble_tensor


def random_bits(key: int, step: Tensor, index: Tensor) -> Tensor:
    """Return 16 random bits for each element, as int32.

    key: of the tensor. step: 0-dim, number of the update. index: int64, of the elements in the
    full tensor.
    """
    start = scramble_tensor(step.to(torch.int64) * SIGNED_GAMMA + key)
    return (scramble_tensor(start + index * SIGNED_GAMMA) & 0xFFFF).to(torch.int32)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 numbers, with the exact value as expectation.

    bits: 16 random bits for each element, int32. An inf or nan stays one.
    """
    raised = (values.view(torch.int32) + bits) & -0x10000
    rounded = torch.where(values.isfinite(), raised.view(torch.float32), values)
    return rounded.to(torch.bfloat16)
