"""Compute the gradient norm and clip gradients of parameters on different device meshes."""

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
    """Return this rank's gradient shards, keyed by the number of ranks that hold a copy of each."""
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
    """Return the 2-norms (0-dim, float64) of pieces of `grads`.

    Squares of finite fp32 numbers cannot overflow in float64.
    """
    pieces: list[Tensor] = []
    for grad in grads:
        if grad.is_cpu and grad.numel() > CPU_CHUNK:
            pieces.extend(grad.flatten().split(CPU_CHUNK))
        else:
            pieces.append(grad.flatten() if grad.is_cpu else grad)
    return list(torch._foreach_norm(pieces, 2, dtype=torch.float64))


def sum_of_squares(norms: Mapping[int, list[Tensor]]) -> Tensor:
    """Return this rank's contribution to the squared gradient norm (0-dim).

    The squared norm is the sum of the contributions of all ranks.
    norms: keyed by the number of copies of the shard. Each of n copies contributes 1/n, so that a
    non-finite number in any copy reaches the sum.
    """
    if not norms:
        raise ValueError(
            "No parameter has a gradient. Expected at least one before clipping. "
            "Call backward() first"
        )
    contributions = []
    for copies, values in norms.items():
        square = torch.stack(values).square().sum()
        contributions.append(square / copies if copies > 1 else square)
    return sum(contributions[1:], start=contributions[0])


def global_norm(square: Tensor, all_ranks: ProcessGroup | None) -> Tensor:
    """Return the 2-norm over all ranks from each rank's contribution to the squared norm.

    One all-reduce of one float64 makes the norm bitwise equal on every rank. Ranks that hold only
    copies take part too. All replicas therefore make the same decision to clip, skip, or stop.
    """
    if all_ranks is not None:
        dist.all_reduce(square, group=all_ranks)
    return square.sqrt()


def gradient_norm(parameters: Iterable[Tensor], all_ranks: ProcessGroup | None = None) -> Tensor:
    """Return the global 2-norm of all gradients (0-dim, float64, equal on every rank).

    Does not block the host. A non-finite gradient on any rank makes the norm non-finite. The caller
    must then skip the update.
    """
    gradients = local_gradients(parameters)
    square = sum_of_squares({copies: local_norms(grads) for copies, grads in gradients.items()})
    return global_norm(square, all_ranks)


def clipping_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what to divide gradients of norm `norm` by, so that their norm is at most `max_norm`.

    0-dim, float32 for gradients of any dtype, as the `grad_scale` of torch's fused optimizers. A
    divisor too large for float32 is inf: all gradients become 0.
    """
    return ((norm + 1e-6) / max_norm).clamp(min=1.0).float()


def divide_gradients(parameters: Iterable[Tensor], divisor: Tensor) -> None:
    """Divide all gradients in place by `divisor` (0-dim)."""
    for grads in local_gradients(parameters).values():
        if grads[0].dtype in (torch.float32, torch.float64):
            torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        else:  # a divisor in bfloat16 would be wrong by up to 0.4 %
            for grad in grads:
                grad.copy_(grad.float().div_(divisor))
