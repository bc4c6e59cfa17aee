"""The shard of a full tensor that a rank holds: its elements, and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor, detached."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return shard.detach()


def local_positions(tensor: Any) -> list[Tensor]:
    """Return `shard_positions` of this rank's shard."""
    is_sharded = hasattr(tensor, "placements")
    return shard_positions(tensor, tensor.device_mesh.get_coordinate() if is_sharded else ())


def shard_positions(tensor: Any, coordinate: Sequence[int]) -> list[Tensor]:
    """For each dimension, return the indices in the full tensor of a shard's local positions.

    `tensor` is a tensor or a DTensor. Each result is int64, shape (local size,), in memory order.
    Torch's own sharding code is applied to the indices, placement by placement, so that uneven and
    strided shards (FSDP over TP) are exact. Raises ValueError for a partial placement.

    coordinate: of a rank in the tensor's mesh.
    """
    # Each tensor of indices extends along its own dimension, which a placement then splits.
    ndim = tensor.ndim
    positions = [
        torch.arange(n).view([-1 if d == dim else 1 for d in range(ndim)])
        for dim, n in enumerate(tensor.shape)
    ]
    for mesh_dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(
                f"a tensor placed as {placement} has no elements of its own: shard or replicate it"
            )
        shards, _ = placement._split_tensor(
            positions[placement.dim], tensor.device_mesh.size(mesh_dim), with_padding=False
        )
        positions[placement.dim] = shards[coordinate[mesh_dim]]
    return [indices.flatten() for indices in positions]
