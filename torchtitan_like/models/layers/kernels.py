"""Attention on one device: the kernels behind the seam `Attention.core`, and masks that end at document borders.

A kernel is two functions. `mask` says, in a form of its own, which keys each query sees; the model calls it once per
forward pass, for all layers. `core` computes softmax(q k^T / sqrt(head_dim)) v under that mask, in every layer.

The queries are the last tokens of the keys' sequence: query i of n stands at place g = keys - n + i. It sees the keys up to
its own place, from the start of its document on, g - position (without a mask: from the first key on). So a query always
sees itself, and no row is empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

# (q, k, v, mask) -> q's shape; (batch, heads, seq, head_dim) each. k and v may have fewer heads, each of which then serves a
# group of neighbouring query heads.
Core = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# (positions in their documents (batch, queries), dtype of activations, keys) -> what the kernel's core takes.
Mask = Callable[[Tensor, torch.dtype, int], Any]

_HALF = (torch.float16, torch.bfloat16)


class Kernel(NamedTuple):
    """What computes attention; a device or dtype that cannot do it is refused before a run (`attention_rules`)."""

    core: Core
    mask: Mask


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; mask: see `additive_mask`."""
    square = q.shape[2] == k.shape[2]
    if q.is_cuda and (mask is not None or q.dtype not in _HALF):
        # CUDA's flash kernel takes groups but only half precision and no mask; the others want equal heads.
        k, v = equal_heads(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    if mask is None and square:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if mask is None and _is_flash_possible(q, k, v):
        # This operator's triangle ends at the last query and key, unlike that of `is_causal`.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return out
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def additive_mask(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
    """0 where a query sees a key, else -inf: (batch, 1, queries, keys) in the activations' dtype.

    From a boolean mask every layer would make such a one for itself, and keep it for its backward.
    """
    place, start = _place_and_start(positions, num_keys)
    key = torch.arange(num_keys, device=positions.device)
    sees = (key <= place[:, None]) & (key >= start[:, :, None])
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf).unsqueeze(1)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """FlexAttention (arXiv:2412.05496), which leaves out blocks of keys that no query sees; mask: see `block_mask`."""
    from torch.nn.attention import flex_attention as flex

    if mask is None:
        return causal_attention(q, k, v)
    out: Tensor = _compiled(flex.flex_attention, q)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


def block_mask(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Any:
    """A `torch.nn.attention.flex_attention.BlockMask`."""
    from torch.nn.attention import flex_attention as flex

    place, start = _place_and_start(positions, num_keys)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= place[query]) & (key >= start[batch, query])

    build = _compiled(flex.create_block_mask, positions)
    return build(sees, positions.shape[0], None, positions.shape[1], num_keys, device=positions.device)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The flash kernel over all documents of all samples as sequences of their own; mask: see `document_borders`."""
    from torch.nn.attention import varlen

    if mask is None:
        return causal_attention(q, k, v)
    k, v = equal_heads(q, k, v)
    batch, _, seq, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = varlen.varlen_attn(q, k, v, mask, mask, seq, seq, window_size=(-1, 0))
    return cast(Tensor, out.unflatten(0, (batch, seq)).transpose(1, 2))


def document_borders(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
    """Where documents begin in the samples laid end to end, and the end: int32 (documents + 1,).

    Waits for the device: how many documents there are decides the size. Raises ValueError when there are more keys than
    queries, as the documents of both are then not the same.
    """
    if positions.shape[1] != num_keys:
        raise ValueError(
            f'attn_type = "varlen" got {positions.shape[1]} queries for {num_keys} keys: expected whole sequences; '
            'use attn_type = "flex" or "sdpa"'
        )
    starts = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).int()


KERNELS = {
    "sdpa": Kernel(causal_attention, additive_mask),
    "flex": Kernel(flex_attention, block_mask),
    "varlen": Kernel(varlen_attention, document_borders),
}


def attention_kernel(attn_type: str) -> Kernel:
    """The kernel of an attention type, with the reference kernel ("sdpa") in its place on CPU.

    The other kernels cannot train on CPU. Under the same mask all of them compute the same.
    """
    kernel, reference = KERNELS[attn_type], KERNELS["sdpa"]
    if kernel is reference:
        return kernel

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return (reference if q.device.type == "cpu" else kernel).core(q, k, v, mask)

    def mask(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Any:
        chosen = reference if positions.device.type == "cpu" else kernel
        return chosen.mask(positions, dtype, num_keys)

    return Kernel(core, mask)


def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q, each head repeated for its group."""
    group_size = q.shape[1] // k.shape[1]
    if group_size == 1:
        return k, v
    return k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)


def _place_and_start(positions: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Of each query the place among the keys, (queries,), and that of its document's first token, (batch, queries)."""
    place = torch.arange(num_keys - positions.shape[1], num_keys, device=positions.device)
    return place, place - positions


def _is_flash_possible(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for what CUDA's flash kernel computes."""
    if not q.is_cuda or q.shape[-1] % 8:
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_flash_attention(params)


def _compiled(function: Any, example: Tensor) -> Any:
    """FlexAttention's functions are made to be compiled; a compiled caller does it itself.

    On CPU, where it has no backward, they run as they are: enough to compare numbers.
    """
    if torch.compiler.is_compiling() or not example.is_cuda:
        return function
    return _compile_once(function)


@functools.cache
def _compile_once(function: Any) -> Any:
    return torch.compile(function)
