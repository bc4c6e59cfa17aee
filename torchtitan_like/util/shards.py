"""The shard of a full tensor that a rank holds: its elements, their positions, and their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torchtitan_like.util.boxes import Box, Span, slices


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


def local_boxes(tensor: Any) -> list[tuple[Box, Tensor]]:
    """Return the boxes of the full tensor that this rank holds, each with a view of its memory.

    A plain tensor is one box. Uneven and strided shards of a DTensor are exact. All steps are 1.
    """
    local = local_shard(tensor)
    if not local.numel():  # a rank may have no rows, or may not be part of the mesh
        return []
    dims = [_runs(positions) for positions in local_positions(tensor)]
    offsets = [[sum(n for _, n, _ in runs[:i]) for i in range(len(runs))] for runs in dims]
    boxes = []
    for indices in product(*(range(len(runs)) for runs in dims)):
        box = tuple(runs[i] for runs, i in zip(dims, indices, strict=True))
        local_box = tuple(
            (starts[i], n, 1) for starts, i, (_, n, _) in zip(offsets, indices, box, strict=True)
        )
        boxes.append((box, local[slices(local_box)]))
    return boxes


def shard_boxes(tensor: Any, coordinate: Sequence[int]) -> list[Box]:
    """Return the boxes of the full tensor that the rank at `coordinate` of its mesh holds."""
    return list(product(*map(_runs, shard_positions(tensor, coordinate))))


def _runs(positions: Tensor) -> list[Span]:
    """Group increasing positions into runs of neighbors; no run if there are no positions."""
    if not len(positions):
        return []
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:
        return [(first, len(positions), 1)]
    starts = [0, *(1 + (positions.diff() != 1).nonzero().flatten()).tolist()]
    ends = [*starts[1:], len(positions)]
    return [(int(positions[i]), end - i, 1) for i, end in zip(starts, ends, strict=True)]
