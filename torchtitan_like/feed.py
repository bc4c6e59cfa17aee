"""What a rank's model is given of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.distributed.world import World

if TYPE_CHECKING:
    from torchtitan_like.distributed.context import ContextParallel

# Tokens, labels and positions in their documents, where those are asked for.
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Feed:
    """Hands batches to this rank's device. context: cuts sequences over ranks; None where they are whole."""

    def __init__(self, world: World, context: ContextParallel | None) -> None:
        self._to_device, self._context = world.to_device, context

    def local(self, batch: Batch) -> Tokens:
        """A batch (num_micro, local_batch, seq) on the host; with context parallelism this rank's piece of every sequence."""
        whole = batch.tokens, batch.labels, batch.positions
        return whole if self._context is None else self._context.shard(*whole)

    def to_device(self, local: Tokens, micro: int | slice) -> Tokens:
        """One micro-batch, or all as one batch for the pipeline to cut: (rows, seq)."""
        tokens, labels, positions = (None if x is None else x[micro].view(-1, x.shape[-1]) for x in local)
        assert tokens is not None and labels is not None
        positions = None if positions is None else self._to_device(positions)
        return self._to_device(tokens), self._to_device(labels), positions
