"""Check attention settings against model and device, without importing torch."""

from __future__ import annotations

ATTENTION_TYPES = ("sdpa", "flex", "varlen")
MASK_TYPES = ("causal", "block_causal")
HALF_TYPES = ("float16", "bfloat16")
# Backends of torch.nn.functional.scaled_dot_product_attention, and the SDPBackend of each.
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def check_attention(attn_type: str, attn_mask_type: str) -> list[str]:
    """Return one sentence for each problem of a model's attention arguments."""
    settings = {
        "attn_type": (attn_type, ATTENTION_TYPES),
        "attn_mask_type": (attn_mask_type, MASK_TYPES),
    }
    problems = [
        f"{key} = {value!r}: expected one of {', '.join(values)}; remove it to use the flavor's"
        for key, (value, values) in settings.items()
        if value not in values
    ]
    if not problems and attn_type != "sdpa" and attn_mask_type == "causal":
        problems.append(
            f'attn_type = {attn_type!r}: expected "sdpa" with attn_mask_type = "causal", which has its '
            'own kernel; set attn_mask_type = "block_causal" to end attention at document borders'
        )
    return problems


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
