"""Compute the loss of validation datasets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchtitan_like.data.batches.batch import Batch, count_bytes, count_valid
from torchtitan_like.distributed.data_parallel import free_gathered
from torchtitan_like.resilience.agreement import PendingAgreement, first_stop
from torchtitan_like.step import Feed

if TYPE_CHECKING:
    from torchtitan_like.build import DataParts
    from torchtitan_like.distributed.parallelize import ShardedModel
    from torchtitan_like.optim.ema import AveragedWeights
    from torchtitan_like.optim.optimization import Optimization
    from torchtitan_like.resolved import RankRun


class ValidationInterrupted(Exception):
    """All ranks have ended the validation, because the run must stop."""


class DatasetLoss(NamedTuple):
    """The loss of a dataset: the mean loss per token in nats, and bits per byte of UTF-8.

    bits_per_byte: of the labels that have bytes; BOS and EOS have none. None if the bytes of the
        tokens are unknown.
    """

    loss: float
    bits_per_byte: float | None
    num_tokens: int
    seconds: float


class Validation:
    """Validates a model on all datasets, and again with its averaged weights (`ema.validation`)."""

    def __init__(
        self, run: RankRun, data: DataParts, model: ShardedModel, optim: Optimization
    ) -> None:
        self._run = run
        self.data = data
        self._model = model
        self._optim = optim
        self._feed = Feed(run.world, model.context)

    def is_due(self, step: int) -> bool:
        """Return whether the run validates after `step`."""
        config = self._run.config
        is_regular = step % config.validation.freq == 0
        return bool(self.data.validation_sets) and (
            is_regular or step in (1, config.training.steps)
        )

    def losses(
        self, exchange_requests: Callable[[], PendingAgreement]
    ) -> Iterator[tuple[str, DatasetLoss]]:
        """Yield the loss of each dataset by its name in validation.jsonl. A collective.

        Raises ValidationInterrupted: see `losses_of_datasets`.
        """
        self._model.parts.eval()
        try:
            yield from self._losses_of_model(exchange_requests)
            if self._optim.ema is not None and self._run.config.ema.validation:
                with self._averaged_weights(self._optim.ema):
                    for name, loss in self._losses_of_model(exchange_requests):
                        yield f"{name}.ema" if name else "ema", loss
        finally:
            self._model.parts.train()

    def _losses_of_model(
        self, exchange_requests: Callable[[], PendingAgreement]
    ) -> Iterator[tuple[str, DatasetLoss]]:
        pipeline = self._model.pipeline
        return losses_of_datasets(
            self.data.validation_sets,
            self._model.parts[0] if pipeline is None else pipeline.evaluate,
            self._feed,
            self.data.bytes_of_token,
            self._run.world.gather_losses,
            exchange_requests,
        )

    @contextmanager
    def _averaged_weights(self, averages: AveragedWeights) -> Iterator[None]:
        """Give the model the averaged weights, and then its own back."""

        def refresh() -> None:
            free_gathered(self._model.parts)
            self._optim.refresh()

        self._run.checkpointer.order_updates()
        try:
            with averages.applied():
                refresh()
                yield
        finally:
            refresh()


def losses_of_datasets(
    datasets: Mapping[str, Iterable[Batch]],
    evaluate: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    feed: Feed,
    bytes_of_token: torch.Tensor,
    gather_losses: Callable[[torch.Tensor], torch.Tensor],
    exchange_requests: Callable[[], PendingAgreement],
) -> Iterator[tuple[str, DatasetLoss]]:
    """Yield the exact mean loss per token of each dataset, equal on every topology. A collective.

    evaluate: the model, or the function that runs all of its stages; returns the sum of token
        losses, with those of each token on ranks that compute them.
    bytes_of_token: (vocab_size,).
    exchange_requests: sends this rank's requests to all ranks. After a request to stop, all ranks
        raise ValidationInterrupted before the same batch.
    """
    for name, batches in datasets.items():
        start = time.perf_counter()
        sums = torch.zeros(4, dtype=torch.float64)
        for batch in _until_stop(batches, exchange_requests):
            local = feed.shard(batch)
            output, labels = feed.run(evaluate, batch, local, 0), local[1]
            loss, token_losses = output if isinstance(output, tuple) else (output, None)
            sums[0] += loss.item()
            sums[1] += count_valid(labels)
            num_bytes = count_bytes(labels, bytes_of_token)
            sums[2] += num_bytes.sum()
            if token_losses is not None:
                sums[3] += token_losses.double().cpu()[num_bytes.flatten() > 0].sum()
        loss_sum, num_tokens, total_bytes, with_bytes = gather_losses(sums).sum(0).tolist()
        bits_per_byte = with_bytes / math.log(2) / total_bytes if total_bytes else None
        yield (
            name,
            DatasetLoss(
                loss=loss_sum / max(1.0, num_tokens),
                bits_per_byte=bits_per_byte,
                num_tokens=int(num_tokens),
                seconds=time.perf_counter() - start,
            ),
        )


def _until_stop(
    batches: Iterable[Batch], exchange_requests: Callable[[], PendingAgreement]
) -> Iterator[Batch]:
    agreement = None

    def check() -> None:
        if agreement is not None and first_stop(agreement.wait().requests) is not None:
            raise ValidationInterrupted

    for batch in batches:
        check()
        agreement = exchange_requests()
        yield batch
    check()  # another rank may have had no last batch
