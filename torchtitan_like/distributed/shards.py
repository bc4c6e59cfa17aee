"""The elements of a sharded parameter that each rank of its mesh holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def shard_indices(parameter: Any, coordinate: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """For each dimension, return the indices in the full parameter of a shard's positions.

    Torch's own sharding code is applied to the indices, placement by placement, so that uneven and
    strided shards (FSDP over TP) are exact.

    parameter: a DTensor; or a plain tensor, which is a shard of its own.
    coordinate: of a rank in the parameter's mesh.
    Raises ValueError if a rank has no elements of its own.
    """
    # Each tensor of indices extends along its own dimension, which a placement then splits.
    ndim = parameter.ndim
    positions = [
        torch.arange(n).view([-1 if d == dim else 1 for d in range(ndim)])
        for dim, n in enumerate(parameter.shape)
    ]
    for mesh_dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(
                f"a parameter placed as {placement} has no elements of its own: shard or replicate it"
            )
        shards, _ = placement._split_tensor(
            positions[placement.dim], parameter.device_mesh.size(mesh_dim), with_padding=False
        )
        positions[placement.dim] = shards[coordinate[mesh_dim]]
    return [p.flatten().numpy() for p in positions]


def own_indices(parameter: Any) -> list[npt.NDArray[np.int64]]:
    """Return `shard_indices` of this rank's shard."""
    is_sharded = hasattr(parameter, "placements")
    return shard_indices(parameter, parameter.device_mesh.get_coordinate() if is_sharded else ())
