"""Which elements of a full tensor a rank holds, from the placements of a DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_positions(tensor: Any) -> list[Tensor]:
    """For each dimension, return the indices in the full tensor of this rank's local positions.

    `tensor` is a tensor or a DTensor. Each result is int64, shape (local size,), in memory order.
    Torch's own sharding code is applied to the indices, placement by placement, so that uneven and
    strided shards (FSDP over TP) are exact. Raises ValueError for a partial placement.
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
        mesh = tensor.device_mesh
        shards, _ = placement._split_tensor(
            positions[placement.dim], mesh.size(mesh_dim), with_padding=False
        )
        positions[placement.dim] = shards[mesh.get_local_rank(mesh_dim)]
    return [indices.flatten() for indices in positions]
