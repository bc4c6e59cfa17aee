"""Validation batches: the same samples in every evaluation and on every layout.

Batch b has the samples [b * local_batch_size, (b + 1) * local_batch_size) of the dataset in file
order. Rank r of n reads the batches r, r + n, r + 2n, ... The samples, and therefore the
token-weighted mean of their loss, do not depend on n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_like.data.batches.batch import Batch, Plan
from torchtitan_like.data.batches.workers import PlannedBatches, make_reader
from torchtitan_like.data.errors import ReadInterrupted
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader


class ValidationBatches:
    """The validation batches of one rank; any number of iterations is possible.

    num_batches: number of batches that all ranks read; -1 for all batches of the dataset. identity:
        name -> value, identifies the dataset.

    Every rank has the same number of batches (``len``), as `Batch` with num_micro = 1. All labels
    of rows after the last sample are ignored.
    """

    def __init__(
        self,
        samples: PackedSamples,
        *,
        local_batch_size: int,
        num_batches: int,
        sharing: tuple[int, int],
        with_positions: bool,
        dataloader: DataLoader,
    ) -> None:
        self._local_batch_size = local_batch_size
        self.identity = samples.identity
        self._dp_rank, self._dp_size = sharing
        num_text_batches = -(-samples.num_samples // local_batch_size)
        self.num_batches = (
            num_text_batches if num_batches < 0 else min(num_batches, num_text_batches)
        )
        self.num_samples = min(samples.num_samples, self.num_batches * local_batch_size)
        joined = JoinedSamples([samples])
        batches = PlannedBatches(joined, local_batch_size, with_positions=with_positions)
        # Returns True if the run is to stop. The batches from a late one on are then empty.
        self.is_interrupted: Callable[[], bool] = lambda: False
        self._batches = batches
        self._read = make_reader(batches, self._plans, dataloader, lambda: self.is_interrupted())

    def __len__(self) -> int:
        return math.ceil(self.num_batches / self._dp_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches. After an interruption, yield empty ones until all ranks stop together."""
        try:
            yield from self._read()
        except ReadInterrupted:
            rows = np.zeros(self._local_batch_size, np.int64)
            empty = self._batches[Plan(rows + NO_SAMPLE, rows, 0, 0)]
            while True:
                yield empty

    def _plans(self) -> Iterator[Plan]:
        size = self._local_batch_size
        for step in range(len(self)):
            first = step * self._dp_size * size
            positions = first + self._dp_rank * size + np.arange(size)
            samples = np.where(positions < self.num_samples, positions, NO_SAMPLE)
            end = min(first + self._dp_size * size, self.num_samples)
            yield Plan(samples, positions, end, max(end - first, 0))
