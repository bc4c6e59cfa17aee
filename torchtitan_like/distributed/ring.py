"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, queries stay.

While a rank computes with the keys it has, it sends them on and receives the next ones. What it finds for one piece of keys
is merged with what it has found before by the log-sum-exp of the scores (Milakov & Gimelshein 2018, arXiv:1805.02867). In
backward the keys travel again, and their gradients with them, until they are back at home.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torchtitan_like.distributed.context import ContextParallel

_aten = torch.ops.aten


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: ContextParallel) -> Tensor:
    """Causal attention over all ranks' keys; (batch, heads, local seq, head_dim) each, k and v perhaps with fewer heads."""
    out: Tensor = _RingAttention.apply(q, k, v, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: ContextParallel) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        q = q if q.stride(-1) == 1 else q.contiguous()  # the kernels take a head's dimensions as neighbours, unchecked
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        own = kv = torch.cat([k, v], dim=-1)
        extras: tuple[Tensor, ...] = ()
        for step in range(ring.size):
            next_kv = _pass_on(kv, ring) if step + 1 < ring.size else None
            piece = _piece(ring, (ring.rank - step) % ring.size, q.shape[2])
            if piece is not None:
                rows, columns = piece
                k, v = kv[:, :, columns].split([q.shape[-1], out.shape[-1]], dim=-1)
                part, part_lse, *rest = _flash(q[:, :, rows], k, v, causal=step == 0)
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
                extras = extras or tuple(rest)
            kv = kv if next_kv is None else next_kv()
        out = out.to(q.dtype)
        ctx.ring, ctx.head_dim = ring, q.shape[-1]
        ctx.save_for_backward(q, own, out, lse, *extras)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse, *extras = ctx.saved_tensors
        ring, wide = ctx.ring, lse.dtype
        grad, sizes = grad.contiguous(), [ctx.head_dim, out.shape[-1]]
        dq, own = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
        dkv, next_dkv = own, None
        for step in range(ring.size):
            next_kv = _pass_on(kv, ring) if step + 1 < ring.size else None
            if step > 0:  # gradients of the keys that are here now, by the ranks that they have been to
                dkv = torch.zeros_like(own) if next_dkv is None else next_dkv()
            piece = _piece(ring, (ring.rank - step) % ring.size, q.shape[2])
            if piece is not None:
                rows, columns = piece
                k, v = kv[:, :, columns].split(sizes, dim=-1)
                of_rows = [x[:, :, rows] for x in (grad, q, out, lse)]
                parts = _flash_backward(of_rows, k, v, extras, causal=step == 0)
                dq[:, :, rows] += parts[0]
                dkv[:, :, columns] += torch.cat(parts[1:], dim=-1)
            if step > 0:
                next_dkv = _pass_on(dkv, ring)
            kv = kv if next_kv is None else next_kv()
        dkv = own if next_dkv is None else own + next_dkv()
        dk, dv = dkv.to(kv.dtype).split(sizes, dim=-1)
        return dq.to(q.dtype), dk, dv, None


def _pass_on(x: Tensor, ring: ContextParallel) -> Callable[[], Tensor]:
    """Start sending `x` to the next rank; the result waits for what the rank before has sent, and returns it.

    Every rank passes on equally many tensors in the same order. All of the ring's messages are under way at once, so no rank
    waits for another to receive first.
    """
    arriving = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=ring.group, group_peer=(ring.rank + 1) % ring.size),
            dist.P2POp(dist.irecv, arriving, group=ring.group, group_peer=(ring.rank - 1) % ring.size),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait


def _piece(ring: ContextParallel, source: int, seq: int) -> tuple[slice, slice] | None:
    """Which of this rank's `seq` queries see which keys of rank `source`; None where none do.

    Of another rank's chunks a query sees those before its own, whole. So whatever is seen is a rectangle.
    """
    mine, theirs = ring.chunks[ring.rank], ring.chunks[source]
    length = seq // len(mine)
    queries = [i for i, chunk in enumerate(mine) if chunk >= theirs[0]]
    keys = [i for i, chunk in enumerate(theirs) if chunk <= mine[-1]]
    if not queries or not keys:
        return None
    return slice(queries[0] * length, seq), slice(0, (keys[-1] + 1) * length)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to `out` and `lse`, in place, what attention to further keys gives: outputs are means with weights exp(lse)."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[Tensor]:
    """Output, log-sum-exp (batch, heads, queries), and what else the kernel's backward asks for."""
    if q.is_cuda:
        results = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return [results[i] for i in (0, 1, 6, 7)]
    return list(_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal))


def _flash_backward(
    of_queries: list[Tensor], k: Tensor, v: Tensor, extras: list[Tensor], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of these keys in the gradients of q, k, v.

    of_queries: the output's gradient, q, and of all keys together the output and its log-sum-exp.
    """
    grad, q, out, lse = of_queries
    lse = lse.contiguous()
    gradients: tuple[Tensor, Tensor, Tensor]
    if q.is_cuda:
        lengths = (None, None, q.shape[2], k.shape[2])
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, *extras
        )
    else:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return gradients
