"""Check model arguments against their ranges. Never imports torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

# Larger models are mistakes. Their lists of layers and tensors would exhaust memory.
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
MAX_PARAMS = 10**15


def check_limits(args: Any) -> list[str]:
    """Return one sentence for each integer above MAX_SIZE, for numbers of layers above MAX_LAYERS."""
    problems = []
    for key in (field.name for field in dataclasses.fields(args)):
        value = getattr(args, key)
        limit = MAX_LAYERS if key.endswith("layers") else MAX_SIZE
        if isinstance(value, int) and value > limit:
            expected = f"expected at most {limit}; remove it to use the flavor's"
            problems.append(f"{key} = {value}: {expected}")
    return problems


def check_positive(args: Any, keys: Iterable[str]) -> list[str]:
    """Return one sentence for each argument that is not a finite number above 0."""
    return [
        f"{key} = {getattr(args, key)}: expected a number above 0; remove it to use the flavor's"
        for key in keys
        if not 0 < getattr(args, key) < math.inf
    ]


def check_ranges(args: Any, ranges: Iterable[tuple[str, float, float]]) -> list[str]:
    """Return one sentence for each argument that is outside its (key, smallest, largest)."""
    problems = []
    for key, low, high in ranges:
        value = getattr(args, key)
        if not low <= value <= high:
            limit = f"at least {low}" if high == math.inf else f"{low} to {high}"
            nearest = high if value > high else low
            problems.append(f"{key} = {value}: expected {limit}; set {key} = {nearest}")
    return problems


def check_base(rope_theta: float) -> list[str]:
    """Return one sentence if the base of the rotary frequencies is not a finite number above 1."""
    if 1 < rope_theta < math.inf:
        return []
    return [f"rope_theta = {rope_theta}: expected a number above 1; remove it to use the flavor's"]


def check_even(key: str, value: int) -> list[str]:
    """Return one sentence if the number of rotated dimensions is odd."""
    if value % 2 == 0:
        return []
    return [
        f"{key} = {value}: expected an even number, since it is rotated in pairs; "
        f"set {key} = {value + 1}"
    ]


def check_divisor(key: str, value: int, of_key: str, of_value: int) -> list[str]:
    """Return one sentence if `value` does not divide `of_value`; both are above 0."""
    if of_value % value == 0:
        return []
    nearest = max(n for n in range(1, value) if of_value % n == 0)
    return [f"{key} = {value}: expected a divisor of {of_key} = {of_value}; set {key} = {nearest}"]


# The scalings of rotary frequencies that transformers has for whole models.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of rotated queries and keys, `0.1 mscale ln(factor) + 1`.

    arXiv:2309.00071, equation 22; `mscale` is DeepSeek's. 1 if the context is not longer.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
