"""Gradient norm and clipping over parameters of any mix of meshes, on local shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


@torch.no_grad()  # a DTensor then gives its shard as it is, without a view of it for autograd
def local_gradients(parameters: Iterable[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """This rank's gradient shards, by (mesh, its dimensions over which they are sharded).

    A replicated gradient has no such dimension and is counted as it is; nothing is counted twice. NOTE: meshes, since equal
    ones are one key, and their process groups are not: of two equal meshes in a process DTensor's caches hand out now one,
    now the other (torch 2.13), and each rank must have the same keys.
    """
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        if hasattr(grad, "placements"):
            # A strided shard (FSDP over tensor parallelism) does not call itself a shard.
            sharded = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
            groups[grad.device_mesh, sharded].append(grad.to_local())
        else:
            groups[None, ()].append(grad)
    return groups


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(grads, 2, dtype=torch.promote_types(grads[0].dtype, torch.float32))
    return torch.stack(norms).square().sum()


def global_norm(squares: dict[tuple[Any, ...], Tensor], across: Iterable[Any] = ()) -> Tensor:
    """The 2-norm over all ranks from local sums of squares, keyed as `local_gradients` does.

    across: groups whose ranks hold other parameters altogether; the sum of all squares is added up over them too.
    """
    if not squares:
        raise ValueError("no parameter has a gradient: was backward run?")
    total: Any = 0.0
    for (mesh, sharded), square in squares.items():
        for dim in sharded:
            # Each rank of the group holds another shard: the squares add up to those of the full gradient.
            dist.all_reduce(square, group=mesh.get_group(dim))
        total = total + square
    for group in across:
        dist.all_reduce(total, group=group)
    norm: Tensor = total.sqrt()
    return norm


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, across: Iterable[Any] = ()) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before.

    The norm is computed in fp32 (float64 for float64 gradients) whatever the gradients' dtype: 0-dim, equal on every
    rank. Nothing waits for it on the host. A non-finite norm makes every gradient non-finite; the caller gates the
    update on it.
    """
    groups = local_gradients(parameters)
    norm = global_norm({sharded_over: _sum_of_squares(grads) for sharded_over, grads in groups.items()}, across)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm
