"""Validation batches: always the same samples, whatever the layout and however often they are read.

Batch b is samples [b * local_batch_size, (b + 1) * local_batch_size) of the text in its own order; rank r of n
reads the batches r, r + n, r + 2n, ... Which samples are read, and so the token-weighted mean of their loss, does
not depend on n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_like.data.batches.batch import Batch, Plan
from torchtitan_like.data.batches.workers import PlannedBatches, reader
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader


class ValidationBatches:
    """Can be iterated any number of times. ``num_batches``: how many of the text's batches are read, -1 for all. ``identity``:
    what the text is known by.

    Every rank gets the same number of batches (its ``len``), as `Batch` with num_micro = 1; rows beyond the last
    sample are masked wholly.
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
        self._local_batch_size, self.identity = local_batch_size, samples.identity
        self._dp_rank, self._dp_size = sharing
        in_text = -(-samples.num_samples // local_batch_size)
        self.num_batches = in_text if num_batches < 0 else min(num_batches, in_text)
        self.num_samples = min(samples.num_samples, self.num_batches * local_batch_size)
        batches = PlannedBatches(JoinedSamples([samples]), local_batch_size, with_positions=with_positions)
        self._read = reader(batches, self._plans, dataloader)

    def __len__(self) -> int:
        return math.ceil(self.num_batches / self._dp_size)

    def __iter__(self) -> Iterator[Batch]:
        return self._read()

    def _plans(self) -> Iterator[Plan]:
        size = self._local_batch_size
        for step in range(len(self)):
            first = step * self._dp_size * size
            positions = first + self._dp_rank * size + np.arange(size)
            samples = np.where(positions < self.num_samples, positions, NO_SAMPLE)
            after = min(first + self._dp_size * size, self.num_samples)
            yield Plan(samples, positions, after, max(after - first, 0))
