"""Stochastic rounding to bfloat16 whose random bits are a function, equal on every layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from torchtitan_like.util.splitmix import GOLDEN_GAMMA

# Multipliers of splitmix64 (Steele et al. 2014) and the constant of `util.splitmix`, as signed
# integers: torch's int64 wraps as uint64 does.
_GOLDEN_GAMMA = int(GOLDEN_GAMMA) - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def random_key(seed: int, name: str) -> int:
    """Return the start of a tensor's sequence of random numbers, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(key: int, step: Tensor, index: Tensor) -> Tensor:
    """Return 16 random bits for each element, as int32.

    key: of the tensor. step: 0-dim, number of the update. index: int64, of the elements in the
    full tensor.
    """
    start = _scramble(step.to(torch.int64) * _GOLDEN_GAMMA + key)
    return (_scramble(start + index * _GOLDEN_GAMMA) & 0xFFFF).to(torch.int32)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 numbers, with the exact value as expectation.

    bits: 16 random bits for each element, int32. An inf or nan stays one.
    """
    raised = (values.view(torch.int32) + bits) & -0x10000
    rounded = torch.where(values.isfinite(), raised.view(torch.float32), values)
    return rounded.to(torch.bfloat16)


def _scramble(x: Tensor) -> Tensor:
    """Return splitmix64's mix of 64-bit integers; equal to `util.splitmix.scramble`."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift without copies of the sign."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
