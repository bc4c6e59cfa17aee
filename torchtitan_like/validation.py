"""The loss of texts that are not trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from torchtitan_like.data.batches.batch import Batch, count_bytes, count_valid
from torchtitan_like.distributed.world import PendingSum
from torchtitan_like.feed import Feed
from torchtitan_like.models.layers.head import LossWithTokens, total_of
from torchtitan_like.resilience.requests import decode_requests, first_stop


class BrokenOff(Exception):
    """All ranks have left the validation, as the run is to stop."""


class TextLoss(NamedTuple):
    """Mean loss per token of a text in nats; bits_per_byte of the UTF-8 bytes its labels stand for, None without any."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int
    seconds: float


def losses_of_texts(
    texts: Mapping[str, Iterable[Batch]],
    evaluate: Callable[..., torch.Tensor | LossWithTokens],
    feed: Feed,
    bytes_of_token: torch.Tensor,
    gather_losses: Callable[[torch.Tensor], torch.Tensor],
    ask: Callable[[], PendingSum],
) -> Iterable[tuple[str, TextLoss]]:
    """The exact mean loss per token over each text's batches, the same on every topology; a collective.

    evaluate: the model, or what makes its stages one; returns the sum of token losses. bytes_of_token: (vocab_size,). ask:
    sends this rank's requests to all; where one of them is a stop, BrokenOff is raised on every rank before the same batch.
    """
    for name, batches in texts.items():
        begin = time.perf_counter()
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in _until_stop(batches, ask):
            local = feed.shard(batch)
            loss = total_of(evaluate(*feed.to_device(local, 0)))
            counts = count_valid(local[1]), count_bytes(local[1], bytes_of_token)
            sums += torch.tensor([loss.item(), *counts], dtype=torch.float64)
        loss_sum, num_tokens, num_bytes = gather_losses(sums).sum(0).tolist()
        bits_per_byte = loss_sum / math.log(2) / num_bytes if num_bytes else None
        yield (
            name,
            TextLoss(loss_sum / max(1.0, num_tokens), bits_per_byte, int(num_tokens), time.perf_counter() - begin),
        )


def _until_stop(batches: Iterable[Batch], ask: Callable[[], PendingSum]) -> Iterator[Batch]:
    agreement = None
    for batch in batches:
        if agreement is not None and first_stop(decode_requests(agreement.wait())) is not None:
            raise BrokenOff
        agreement = ask()
        yield batch
    if agreement is not None:
        agreement.wait()
