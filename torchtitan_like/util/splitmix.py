"""SplitMix64: a fixed hash of 64-bit integers, equal on every platform and numpy version.

Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 14.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


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
