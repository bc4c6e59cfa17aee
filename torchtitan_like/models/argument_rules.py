"""Check model arguments: sizes, attention, load balancing. Never imports torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

# Larger models are mistakes. Their lists of layers and tensors would exhaust memory.
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
MAX_PARAMS = 10**15

ATTENTION_TYPES = ("sdpa", "flex", "varlen")
# The ones that can compute a window, a chunk, or a sink.
LOCAL_ATTENTION_TYPES = ("sdpa", "flex")
MASK_TYPES = ("causal", "block_causal")
HALF_TYPES = ("float16", "bfloat16")
# Backends of torch.nn.functional.scaled_dot_product_attention, and the SDPBackend of each.
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
# The methods of `layers.balance.Balance`.
BALANCE_METHODS = ("none", "bias", "sequence", "global")
# The scalings of rotary frequencies that transformers has for whole models.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


# ---- sizes


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


def check_choices(args: Any, *choices: tuple[str, tuple[str, ...]], reason: str = "") -> list[str]:
    """Return one sentence for each argument that is not one of its (key, values).

    reason: completes "expected one of VALUES", such as " with a sliding window".
    """
    return [
        f"{key} = {getattr(args, key)!r}: expected one of {', '.join(values)}{reason}; remove it to "
        "use the flavor's"
        for key, values in choices
        if getattr(args, key) not in values
    ]


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


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of rotated queries and keys, `0.1 mscale ln(factor) + 1`.

    arXiv:2309.00071, equation 22; `mscale` is DeepSeek's. 1 if the context is not longer.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


# ---- attention


def check_attention(args: Any) -> list[str]:
    """Return one sentence for each problem of `attn_type` and `attn_mask_type`."""
    choices = (("attn_type", ATTENTION_TYPES), ("attn_mask_type", MASK_TYPES))
    problems = check_choices(args, *choices)
    if not problems and args.attn_type != "sdpa" and args.attn_mask_type == "causal":
        problems.append(
            f'attn_type = {args.attn_type!r}: expected "sdpa" with attn_mask_type = "causal", which '
            'has its own kernel; set attn_mask_type = "block_causal" to end attention at document '
            "borders"
        )
    return problems


def check_local_attention(args: Any, reason: str = "") -> list[str]:
    """Return one sentence for each problem of these arguments with windows, chunks, or sinks."""
    choices = (("attn_type", LOCAL_ATTENTION_TYPES), ("attn_mask_type", MASK_TYPES))
    return check_choices(args, *choices, reason=reason)


def unsupported_attention(attn_type: str, *, device_type: str, dtype: str, head_dim: int) -> str:
    """Return why a device cannot compute an attention type in `dtype`; empty if it can.

    dtype: the compute dtype (training.mixed_precision_param).
    """
    if (
        attn_type == "sdpa" or device_type == "cpu"
    ):  # on CPU the reference kernel replaces the others
        return ""
    if attn_type == "varlen" and dtype not in HALF_TYPES:
        return (
            f'attn_type = "varlen" computes in half precision only, not in {dtype}: '
            'set training.mixed_precision_param = "bfloat16", or attn_type = "flex"'
        )
    if attn_type == "varlen" and (head_dim % 8 or head_dim > 256):
        return (
            f'attn_type = "varlen" needs heads of 8, 16, ... 256 dimensions, not {head_dim}: '
            'set attn_type = "flex"'
        )
    if attn_type == "flex" and dtype == "float64":
        return 'attn_type = "flex" has no kernel for float64: set attn_type = "sdpa"'
    return ""


def slow_attention(kernel: str, *, dtype: str, head_dim: int) -> str:
    """Return why a GPU computes attention slowly, and what to do; empty if it does not.

    kernel: of `BACKENDS`, or another attention type.
    """
    if dtype not in HALF_TYPES:
        return (
            f"the fast kernels do not compute in {dtype}: "
            'set training.mixed_precision_param = "bfloat16"'
        )
    if kernel == "math":
        return (
            f"only the math kernel computes heads of {head_dim} dimensions, and keeps the scores "
            "of all pairs of tokens: change n_heads so that a head has a multiple of 8, at most 256"
        )
    if kernel == "cudnn" and head_dim < 64:
        return (
            f"cuDNN fills heads of {head_dim} dimensions with zeros up to 64: choose fewer heads "
            "(n_heads) of at least 64 dimensions"
        )
    if kernel == "flex" and head_dim & (head_dim - 1):
        padded = 1 << head_dim.bit_length()
        return (
            f"FlexAttention fills heads of {head_dim} dimensions with zeros up to {padded}: "
            "choose a power of two, or another attn_type"
        )
    return ""


def unsupported_backend(
    backend: str,
    *,
    attn_type: str,
    device_type: str,
    dtype: str,
    needs_mask: bool,
    is_ring: bool,
) -> str:
    """Return what training.attention_backend should be instead; empty if it can compute attention.

    needs_mask: layers end attention at document borders, windows, or chunks.
    """
    if backend == "auto":
        return ""
    if attn_type != "sdpa":
        return f'"auto" with attn_type = "{attn_type}", which has its own kernel'
    if is_ring and backend != "flash":
        return '"auto" or "flash" with a ring, whose parts only that kernel can combine'
    if backend in ("cudnn", "efficient") and device_type == "cpu":
        return '"auto", "flash" or "math" on CPU'
    if backend in ("cudnn", "flash") and device_type != "cpu" and dtype not in HALF_TYPES:
        return f'"auto", "efficient" or "math" in {dtype}, which the others do not compute in'
    if backend == "flash" and needs_mask:
        return '"auto", "cudnn", "efficient" or "math" for masked attention'
    return ""


# ---- load balancing


def check_balance(
    method: str, coeff: float, z_coeff: float, num_experts: int, sequence_coeff: float = 0.0
) -> list[str]:
    """Return one sentence for each problem of the model arguments of `Balance`."""
    problems = []
    if method not in BALANCE_METHODS:
        names = ", ".join(repr(name) for name in BALANCE_METHODS)
        problems.append(
            f"load_balance = {method!r}: expected one of {names}; set 'none' to disable balancing"
        )
    elif num_experts == 0 and method != "none":
        problems.append(
            f"load_balance = {method!r}: expected 'none', since num_experts = 0; remove it"
        )
    if sequence_coeff and method != "bias":
        problems.append(
            f"sequence_loss_coeff = {sequence_coeff}: expected 0 with load_balance = {method!r}; "
            'set load_balance = "bias", or "sequence" with load_balance_coeff for the loss alone'
        )
    for key, value in (
        ("load_balance_coeff", coeff),
        ("router_z_coeff", z_coeff),
        ("sequence_loss_coeff", sequence_coeff),
    ):
        if not 0 <= value < math.inf:
            problems.append(f"{key} = {value}: expected a number of at least 0; set {key} = 0")
    return problems
