"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values rotate over the ranks.

While a rank computes with the keys it has, it sends them to the next rank and receives new ones.
Partial outputs are merged by the log-sum-exp of their scores (Milakov & Gimelshein 2018,
arXiv:1805.02867). In backward the keys rotate again, and their gradients with them, until the
gradients return to the keys' own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_aten = torch.ops.aten


class Ring(Protocol):
    """The ranks of a context-parallel group; `chunks[rank]`: the chunks of a sequence on a rank."""

    group: ProcessGroup
    rank: int
    size: int
    chunks: tuple[tuple[int, ...], ...]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Causal attention over the keys of all ranks; (batch, heads, local seq, head_dim) each.

    k and v may have fewer heads than q.
    """
    out: Tensor = _RingAttention.apply(q, k, v, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        # The kernels assume contiguous head dimensions and do not check it.
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        own = kv = torch.cat([k, v], dim=-1)
        extras: tuple[Tensor, ...] = ()
        for step in range(ring.size):
            next_kv = _send_to_next(kv, ring) if step + 1 < ring.size else None
            visible = _visible(ring, (ring.rank - step) % ring.size, q.shape[2])
            if visible is not None:
                rows, columns = visible
                k, v = kv[:, :, columns].split([q.shape[-1], out.shape[-1]], dim=-1)
                part, part_lse, *rest = _flash(q[:, :, rows], k, v, causal=step == 0)
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
                extras = extras or tuple(rest)
            kv = kv if next_kv is None else next_kv()
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.head_dim = q.shape[-1]
        ctx.save_for_backward(q, own, out, lse, *extras)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse, *extras = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad, sizes = grad.contiguous(), [ctx.head_dim, out.shape[-1]]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        own_dkv = torch.zeros_like(kv, dtype=lse.dtype)
        dkv, next_dkv = own_dkv, None
        for step in range(ring.size):
            next_kv = _send_to_next(kv, ring) if step + 1 < ring.size else None
            if step > 0:  # the gradients of these keys from the ranks that they have visited
                dkv = torch.zeros_like(own_dkv) if next_dkv is None else next_dkv()
            visible = _visible(ring, (ring.rank - step) % ring.size, q.shape[2])
            if visible is not None:
                rows, columns = visible
                k, v = kv[:, :, columns].split(sizes, dim=-1)
                of_rows = [x[:, :, rows] for x in (grad, q, out, lse)]
                parts = _flash_backward(of_rows, k, v, extras, causal=step == 0)
                dq[:, :, rows] += parts[0]
                dkv[:, :, columns] += torch.cat(parts[1:], dim=-1)
            if step > 0:
                next_dkv = _send_to_next(dkv, ring)
            kv = kv if next_kv is None else next_kv()
        dkv = own_dkv if next_dkv is None else own_dkv + next_dkv()
        dk, dv = dkv.to(kv.dtype).split(sizes, dim=-1)
        return dq.to(q.dtype), dk, dv, None


def _send_to_next(x: Tensor, ring: Ring) -> Callable[[], Tensor]:
    """Start sending `x` to the next rank; return a function that waits for the previous rank's tensor.

    Every rank sends equally many tensors in the same order. All messages of the ring are in flight
    at once, so no rank waits for another to receive first.
    """
    received = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=ring.group, group_peer=(ring.rank + 1) % ring.size),
            dist.P2POp(
                dist.irecv, received, group=ring.group, group_peer=(ring.rank - 1) % ring.size
            ),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def _visible(ring: Ring, source: int, seq: int) -> tuple[slice, slice] | None:
    """Return which of this rank's `seq` queries attend to which keys of rank `source`; None if none.

    A query attends to all earlier chunks of another rank as a whole, so the result is a rectangle.
    """
    query_chunks, key_chunks = ring.chunks[ring.rank], ring.chunks[source]
    length = seq // len(query_chunks)
    queries = [i for i, chunk in enumerate(query_chunks) if chunk >= key_chunks[0]]
    keys = [i for i, chunk in enumerate(key_chunks) if chunk <= query_chunks[-1]]
    if not queries or not keys:
        return None
    return slice(queries[0] * length, seq), slice(0, (keys[-1] + 1) * length)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial output into `out` and `lse`, in place: a mean weighted by exp(lse)."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).addcmul_(
        part, (part_lse - total).exp().unsqueeze(-1)
    )
    lse.copy_(total)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[Tensor]:
    """Return the output, log-sum-exp (batch, heads, queries), and what else the backward needs."""
    if q.is_cpu:
        return list(_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))
    results = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return [results[i] for i in (0, 1, 6, 7)]


def _flash_backward(
    of_queries: list[Tensor], k: Tensor, v: Tensor, extras: list[Tensor], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from these keys.

    of_queries: gradient of the output, q, and the output and log-sum-exp over all keys.
    """
    grad, q, out, lse = of_queries
    lse = lse.contiguous()
    gradients: tuple[Tensor, Tensor, Tensor]
    if q.is_cpu:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    else:
        lengths = (None, None, q.shape[2], k.shape[2])
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, *extras
        )
    return gradients
