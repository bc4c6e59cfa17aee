"""Gradient norm and clipping over parameters of any mix of meshes, on local shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor
# Elements of a CPU gradient converted to float64 at a time: 2 MiB, which stays in the cache.
# GPUs convert inside the norm kernel and need no copy.
CPU_CHUNK = 1 << 18


@torch.no_grad()  # to_local() then returns the shard itself, not a view that autograd tracks
def local_gradients(parameters: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """This rank's gradient shards, keyed by the number of ranks that hold a copy of the shard."""
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        if not hasattr(grad, "placements"):
            by_copies[1].append(grad)
            continue
        copies = 1
        for dim, placement in enumerate(grad.placements):
            if placement.is_replicate():
                copies *= grad.device_mesh.size(dim)
        by_copies[copies].append(grad.to_local())
    return by_copies


def local_norms(grads: Iterable[Tensor]) -> list[Tensor]:
    """2-norms (0-dim, float64) of pieces of `grads`.

    Squares of finite fp32 numbers cannot overflow in float64.
    """
    pieces = [
        piece
        for grad in grads
        for piece in (grad.flatten().split(CPU_CHUNK) if grad.is_cpu else (grad,))
    ]
    return list(torch._foreach_norm(pieces, 2, dtype=torch.float64))


def sum_of_squares(norms: Mapping[int, list[Tensor]]) -> Tensor:
    """This rank's share of the squared gradient norm (0-dim); the square is the sum over all ranks.

    norms: keyed by the number of copies of the shard. A shard with n copies counts with 1/n on each
    of their ranks, so that a non-finite number in any copy reaches the sum.
    """
    if not norms:
        raise ValueError("no parameter has a gradient: was backward run?")
    shares = []
    for copies, values in norms.items():
        square = torch.stack(values).square().sum()
        shares.append(square / copies if copies > 1 else square)
    return sum(shares[1:], start=shares[0])


def global_norm(square: Tensor, all_ranks: ProcessGroup | None) -> Tensor:
    """The 2-norm over all ranks from each rank's share of its square.

    One all-reduce of one float64, so that the norm is equal on every rank, bit for bit. Ranks that
    hold only copies take part: replicas then agree on all that follows from the norm (clipping,
    skipping, stopping).
    """
    if all_ranks is not None:
        dist.all_reduce(square, group=all_ranks)
    return square.sqrt()


def clip_gradients(
    parameters: Iterable[Tensor], max_norm: float, all_ranks: ProcessGroup | None = None
) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most `max_norm`.

    Returns the norm before (0-dim, float64, equal on every rank). The host does not wait for it. A
    non-finite gradient on any rank makes the norm non-finite, and with it every gradient; the
    caller gates the update on the norm.
    """
    gradients = local_gradients(parameters)
    square = sum_of_squares({copies: local_norms(grads) for copies, grads in gradients.items()})
    norm = global_norm(square, all_ranks)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in gradients.values():
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm
