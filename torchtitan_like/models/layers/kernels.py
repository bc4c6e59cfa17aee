"""Attention kernels of one device, for the seam `Attention.core`, and masks at document borders.

A kernel is two functions. `mask` builds the kernel's own representation of which keys each query
attends to; the model calls it once per forward pass. `core` computes
softmax(q k^T / sqrt(head_dim)) v under that mask, in every layer.

The queries are the last tokens of the keys' sequence: query i of n has index g = keys - n + i. It
attends to keys from the start of its document (g - position; without a mask: key 0) up to g. A
query always attends to itself, so no row is empty.

Masks have three options. window: a query attends to the last `window` of these keys only, itself
included; 0: to all. chunk: the keys form chunks of this size, and a query attends to the keys of
its own chunk only; 0: to all. has_sink: one more key precedes the sequence, and every query attends
to it. The given number of keys does not include it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan_like.models.argument_rules import BACKENDS
from torchtitan_like.util.compile import compile_function

# (q, k, v, mask) -> shape of q; (batch, heads, seq, head_dim) each. k and v may have fewer heads,
# each shared by a group of adjacent query heads.
Core = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# (positions in their documents (batch, queries), dtype of activations, number of keys) -> mask for
# core
Mask = Callable[[Tensor, torch.dtype, int], Any]

_HALF = (torch.float16, torch.bfloat16)

# Backends of `scaled_dot_product_attention` that are wrong on GPUs for some inputs (q, k, mask).
# "auto" does not use them there.
_KNOWN_WRONG: tuple[tuple[str, Callable[[Tensor, Tensor, Tensor | None], bool]], ...] = (
    # The gradient of q is nan where all scores of a row are far below 0 (pytorch/pytorch#196678).
    ("cudnn", lambda q, k, mask: mask is not None and k.shape[2] % 128 == 64),
)
_selected = "auto"
_host_positions: Tensor | None = None


def select_backend(name: str) -> None:
    """Choose the backend of `scaled_dot_product_attention` in this process: "auto", or a name of
    `argument_rules.BACKENDS`."""
    global _selected
    _selected = name


def _backends(q: Tensor, k: Tensor, mask: Tensor | None) -> list[str]:
    """Return the names of the backends that may compute attention."""
    if _selected != "auto":
        return [_selected]
    if q.is_cpu:
        return list(BACKENDS)
    wrong = [name for name, applies in _KNOWN_WRONG if applies(q, k, mask)]
    return [name for name in BACKENDS if name not in wrong]


class Kernel(NamedTuple):
    """A kernel's functions. `argument_rules` checks before a run that the device supports it.

    mask: a `Mask` with the keywords window, chunk, and has_sink; varlen has no such options.
    """

    core: Core
    mask: Callable[..., Any]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; mask: see `additive_mask`."""
    if mask is None and q.shape[2] != k.shape[2]:
        if "flash" in _backends(q, k, None) and _is_flash_possible(q, k, v):
            # This operator aligns the triangle with the last query and key, unlike `is_causal`.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out: Tensor = flash(q, k, v, is_causal=True)[0]
            return out
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = mask.tril(k.shape[2] - q.shape[2])
    backends = _backends(q, k, mask)
    if not _supports_groups(q, mask, backends):
        k, v = equal_heads(q, k, v)
    options: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": mask is None,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if len(backends) == len(BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, **options)
    with _only(backends):
        return F.scaled_dot_product_attention(q, k, v, **options)


def _only(backends: list[str]) -> Any:
    """Return a context in which `scaled_dot_product_attention` uses these backends only.

    The backward of an attention uses the backend of its forward.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, BACKENDS[name]) for name in backends])


class Choice(NamedTuple):
    """The backend that computes attention, "" if none can, and all that could.

    usable: empty on devices other than CUDA, of which torch does not answer this question.
    """

    backend: str
    usable: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend} (of {', '.join(self.usable)})" if self.usable else self.backend


def choose_backend(
    heads: tuple[int, int],
    seq_len: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_masked: bool = False,
    has_all_queries: bool = True,
) -> Choice:
    """Ask torch which backend `causal_attention` uses for these shapes.

    heads: of queries, and of keys and values. is_masked: with an `additive_mask`. has_all_queries:
    there are as many queries as keys.
    """
    from torch.nn.attention import SDPBackend

    one_head = torch.empty(head_dim, dtype=dtype, device=device, requires_grad=True)
    q, k = (one_head.expand(1, num_heads, seq_len, head_dim) for num_heads in heads)
    mask = None
    if is_masked or not has_all_queries:
        if not is_masked and "flash" in _backends(q, k, None) and _is_flash_possible(q, k, k):
            return Choice("flash", ("flash",))
        mask = torch.empty(seq_len, dtype=dtype, device=device).expand(1, 1, seq_len, seq_len)
    backends = _backends(q, k, mask)
    if not _supports_groups(q, mask, backends):
        k = q
    grouped = q.shape[1] != k.shape[1]
    try:
        with _only(backends):
            choice = torch._fused_sdp_choice(
                q, k, k, mask, is_causal=mask is None, enable_gqa=grouped
            )
    except RuntimeError as error:
        # The first message is of the CPU's choice, the second of CUDA's.
        if not any(text in str(error) for text in ("No viable backend", "No available kernel")):
            raise
        return Choice("")
    names = {getattr(SDPBackend, backend).value: name for name, backend in BACKENDS.items()}
    if not q.is_cuda:
        return Choice(names[choice])
    params = torch.backends.cuda.SDPAParams(q, k, k, mask, 0.0, mask is None, grouped)
    can_use: dict[str, Callable[[Any], bool]] = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
        "math": lambda params: True,
    }
    return Choice(names[choice], tuple(name for name in backends if can_use[name](params)))


def _supports_groups(q: Tensor, mask: Tensor | None, backends: list[str]) -> bool:
    """Return True if the backend accepts fewer heads of keys and values than of queries.

    CUDA's flash kernel does, but only in half precision without a mask. The others need equal
    numbers of heads.
    """
    return q.is_cpu or (mask is None and q.dtype in _HALF and "flash" in backends)


def additive_mask(
    positions: Tensor,
    dtype: torch.dtype,
    num_keys: int,
    *,
    window: int = 0,
    chunk: int = 0,
    has_sink: bool = False,
) -> Tensor:
    """Return 0 where a query attends to a key, else -inf: (batch, 1, queries, keys) in `dtype`.

    From a boolean mask every layer would build such a mask, and save it for its backward.
    """
    index, start = _index_and_start(positions, num_keys, window, chunk)
    key = torch.arange(num_keys, device=positions.device)
    attends = (key <= index[:, None]) & (key >= start[:, :, None])
    if has_sink:
        attends = F.pad(attends, (1, 0), value=True)
    mask = torch.zeros(attends.shape, dtype=dtype, device=attends.device)
    return mask.masked_fill_(~attends, -torch.inf).unsqueeze(1)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """FlexAttention (arXiv:2412.05496): skips blocks of masked keys; mask: see `block_mask`."""
    from torch.nn.attention import flex_attention as flex

    if mask is None:
        return causal_attention(q, k, v)
    attend = _compiled(flex.flex_attention, q)
    out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


def block_mask(
    positions: Tensor,
    dtype: torch.dtype,
    num_keys: int,
    *,
    window: int = 0,
    chunk: int = 0,
    has_sink: bool = False,
) -> Any:
    """Return a `torch.nn.attention.flex_attention.BlockMask`.

    Positions of one sample are those of all samples. The kernel calls `attends` for each sample.
    """
    from torch.nn.attention import flex_attention as flex

    index, start = _index_and_start(positions, num_keys, window, chunk)
    is_shared = positions.shape[0] == 1

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first = start[0, query] if is_shared else start[batch, query]
        return (key <= index[query]) & (key >= first)

    def attends_with_sink(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key == 0) | attends(batch, head, query, key - 1)

    build = _compiled(flex.create_block_mask, positions)
    batch, seq = positions.shape
    device = positions.device
    if has_sink:
        return build(attends_with_sink, batch, None, seq, num_keys + 1, device=device)
    return build(attends, batch, None, seq, num_keys, device=device)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Flash attention over all documents of all samples, each a sequence; mask: `document_borders`."""
    from torch.nn.attention import varlen

    if mask is None:
        return causal_attention(q, k, v)
    k, v = equal_heads(q, k, v)
    batch, _, seq, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = varlen.varlen_attn(q, k, v, mask, mask, seq, seq, window_size=(-1, 0))
    return cast(Tensor, out.unflatten(0, (batch, seq)).transpose(1, 2))


@contextmanager
def documents_of(positions: Tensor | None) -> Iterator[None]:
    """Let models that run meanwhile know their documents on the host, before the device has them.

    positions: on the host, of at least all tokens of a forward pass. See `document_borders`.
    """
    global _host_positions
    before = _host_positions
    _host_positions = positions
    try:
        yield
    finally:
        _host_positions = before


def document_borders(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
    """Return the offsets of documents in the concatenated samples: int32 (bound + 1,).

    The number of documents is counted on the host (`documents_of`), and rounded up to a power of
    two for few different shapes. Offsets beyond it are the end: these documents are empty. Without
    positions on the host it waits for the device.

    Raises ValueError if there are more keys than queries, because their documents then differ.
    """
    if positions.shape[1] != num_keys:
        raise ValueError(
            f'attn_type = "varlen" got {positions.shape[1]} queries for {num_keys} keys: expected whole '
            'sequences; use attn_type = "flex" or "sdpa"'
        )
    counted = positions if _host_positions is None else _host_positions
    bound = 1 << (int((counted == 0).sum()) - 1).bit_length()
    starts = (positions.flatten() == 0).nonzero_static(size=bound + 1, fill_value=positions.numel())
    return starts.flatten().int()


KERNELS = {
    "sdpa": Kernel(causal_attention, additive_mask),
    "flex": Kernel(flex_attention, block_mask),
    "varlen": Kernel(varlen_attention, document_borders),
}


def attention_kernel(attn_type: str) -> Kernel:
    """Return the kernel of an attention type; on CPU tensors it runs the reference ("sdpa") instead.

    The other kernels cannot train on CPU. All kernels compute the same function.
    """
    kernel, reference = KERNELS[attn_type], KERNELS["sdpa"]
    if kernel is reference:
        return kernel

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return (reference if q.is_cpu else kernel).core(q, k, v, mask)

    def mask(positions: Tensor, dtype: torch.dtype, num_keys: int, **options: Any) -> Any:
        chosen = reference if positions.is_cpu else kernel
        return chosen.mask(positions, dtype, num_keys, **options)

    return Kernel(core, mask)


def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with as many heads as q: each head is repeated for its group."""
    group_size = q.shape[1] // k.shape[1]
    if group_size == 1:
        return k, v
    return k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)


def _index_and_start(
    positions: Tensor, num_keys: int, window: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return each query's index among the keys (queries,), and its first key (batch, queries).

    That is the start of its document, window, or chunk, whichever is last.
    """
    index = torch.arange(num_keys - positions.shape[1], num_keys, device=positions.device)
    num_before = positions.clamp(max=window - 1) if window else positions
    if chunk:
        num_before = torch.minimum(num_before, index % chunk)
    return index, index - num_before


def _is_flash_possible(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if CUDA's flash kernel supports these inputs.

    A device that only plans has no kernels, and stands for a GPU of compute capability 8.0 or newer.
    """
    if q.is_cpu or q.shape[-1] % 8 or q.dtype not in _HALF:
        return False
    return not q.is_cuda or q.shape[-1] <= _widest_flash_head(q.get_device())


def _widest_flash_head(device: int) -> int:
    """Return the widest head that CUDA's flash kernel and its backward support on a device; 0: none.

    As in torch's `sdp_utils.cpp`. Its own check, `can_use_flash_attention`, cannot be compiled.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or not torch.backends.cuda.is_flash_attention_available():
        return 0
    has_small_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return 192 if has_small_shared_memory else 256


# As `torch.compiler.assume_constant_result`, which would import torch's compiler here.
_widest_flash_head._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compiled(function: Any, example: Tensor) -> Any:
    """Compile a FlexAttention function, unless the caller is compiled or runs on CPU.

    On CPU, where it has no backward, it runs uncompiled: enough to compare results.
    """
    if torch.compiler.is_compiling() or example.is_cpu:
        return function
    return _compile_once(function)


@functools.cache
def _compile_once(function: Any) -> Any:
    return compile_function(function)
