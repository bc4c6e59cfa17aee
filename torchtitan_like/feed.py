"""Copy a rank's part of a batch to its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.distributed.world import World

if TYPE_CHECKING:
    from torchtitan_like.distributed.context import ContextParallel

# Tokens, labels, and the tokens' positions in their documents (None if not requested).
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Feed:
    """Copies batches to this rank's device.

    context: shards sequences over the ranks of context parallelism; None: whole sequences.
    """

    def __init__(self, world: World, context: ContextParallel | None) -> None:
        self._to_device = world.to_device
        self._context = context

    def shard(self, batch: Batch) -> Tokens:
        """Return the batch (num_micro, local_batch, seq), sharded by context parallelism."""
        tensors = batch.tokens, batch.labels, batch.positions
        return tensors if self._context is None else self._context.shard(*tensors)

    def to_device(self, local: Tokens, micro: int | slice) -> Tokens:
        """Copy one micro-batch to the device as (rows, seq), or a slice of them as one batch."""
        tokens, labels, positions = (
            None if x is None else x[micro].view(-1, x.shape[-1]) for x in local
        )
        assert tokens is not None and labels is not None
        positions = None if positions is None else self._to_device(positions)
        return self._to_device(tokens), self._to_device(labels), positions
