"""What a rank's model is given of a batch, and the loss that it makes of whole texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchtitan_like.data.batch import Batch, count_bytes, count_valid
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
        return (
            self._to_device(tokens),
            self._to_device(labels),
            None if positions is None else self._to_device(positions),
        )


class TextLoss(NamedTuple):
    """Mean loss per token of a text in nats; bits_per_byte of the UTF-8 bytes its labels stand for, None without any."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int
    seconds: float


def losses_of_texts(
    texts: Mapping[str, Iterable[Batch]],
    evaluate: Callable[..., torch.Tensor],
    feed: Feed,
    bytes_of_token: torch.Tensor,
    gather_losses: Callable[[torch.Tensor], torch.Tensor],
) -> Iterable[tuple[str, TextLoss]]:
    """The exact mean loss per token over each text's batches, the same on every topology; a collective.

    evaluate: the model, or what makes its stages one; returns the sum of token losses. bytes_of_token: (vocab_size,).
    """
    for name, batches in texts.items():
        begin = time.perf_counter()
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            local = feed.local(batch)
            loss = evaluate(*feed.to_device(local, 0))
            counts = count_valid(local[1]), count_bytes(local[1], bytes_of_token)
            sums += torch.tensor([loss.item(), *counts], dtype=torch.float64)
        loss_sum, num_tokens, num_bytes = gather_losses(sums).sum(0).tolist()
        bits_per_byte = loss_sum / math.log(2) / num_bytes if num_bytes else None
        yield (
            name,
            TextLoss(loss_sum / max(1.0, num_tokens), bits_per_byte, int(num_tokens), time.perf_counter() - begin),
        )
