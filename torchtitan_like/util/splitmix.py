"""SplitMix64: a fixed hash of 64-bit integers, equal on every platform and numpy version.

Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 14.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Integers = NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

# The same numbers for tensors: int64 wraps as uint64 does.
SIGNED_GAMMA, _SIGNED_1, _SIGNED_2 = (
    int(c) - 2**64 for c in (GOLDEN_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2)
)


def scramble(values: Integers) -> Integers:
    """Apply SplitMix64's output function in place, element-wise. It is a bijection."""
    values ^= values >> np.uint64(30)
    values *= _MULTIPLIER_1
    values ^= values >> np.uint64(27)
    values *= _MULTIPLIER_2
    values ^= values >> np.uint64(31)
    return values


def mix64(values: Integers) -> Integers:
    """Return SplitMix64's next output for each state in ``values``, without changing them."""
    return scramble(values + GOLDEN_GAMMA)


def scramble_tensor(values: Tensor) -> Tensor:
    """`scramble` for an int64 tensor on any device, in place."""
    values ^= _shift_right(values, 30)
    values *= _SIGNED_1
    values ^= _shift_right(values, 27)
    values *= _SIGNED_2
    values ^= _shift_right(values, 31)
    return values


def tensor_key(seed: int, name: str) -> int:
    """Return the start of a tensor's sequence of random numbers, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift without copies of the sign."""
    shifted: Tensor = x >> num_bits
    shifted &= (1 << (64 - num_bits)) - 1
    return shifted
