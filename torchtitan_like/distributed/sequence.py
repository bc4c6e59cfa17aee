"""Give routers the part of each sample that their rank holds.

Context and sequence parallelism shard samples along the sequence. A loss over whole samples sums
counts over these ranks, and experts in turn need the positions of the rank's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_like.distributed.collectives import reduce_from

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torchtitan_like.distributed.context_parallel import ContextParallel


class ShardedSequence:
    """The `Sequence` of `models.layers.balance` for one rank.

    context: shards samples over its ranks; None without context parallelism.
    sequence_group: the tensor-parallel ranks, if they divide each context-parallel shard again.
    """

    def __init__(
        self, context: ContextParallel | None, sequence_group: ProcessGroup | None
    ) -> None:
        self._context = context
        self._sequence_group = sequence_group
        groups = (None if context is None else context.group, sequence_group)
        self._groups = [group for group in groups if group is not None]

    def sum(self, counts: Tensor) -> Tensor:
        """Return the sums of `counts` over the ranks that share the samples."""
        for group in self._groups:
            counts = reduce_from(counts, group)
        return counts

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the indices (length,) in the sample of this rank's tokens."""
        group = self._sequence_group
        num_shards, shard = (1, 0) if group is None else (group.size(), group.rank())
        positions = torch.arange(length * num_shards, device=device)
        if self._context is not None:
            chunks = self._context.chunks[self._context.rank]
            size = len(positions) // len(chunks)
            positions = torch.cat([positions[:size] + chunk * size for chunk in chunks])
        return positions[shard * length : (shard + 1) * length]


def shard_routed_sequences(
    model: nn.Module, context: ContextParallel | None, sequence_group: ProcessGroup | None
) -> None:
    """Replace the `sequence` seams of a model in place."""
    # One object for all layers, so that they can share one compilation.
    sequence = ShardedSequence(context, sequence_group)
    module: Any
    for module in model.modules():
        if hasattr(module, "sequence"):
            module.sequence = sequence
