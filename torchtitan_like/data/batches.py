"""Training batches: the next samples of one global stream, whose only state is a position in it.

Position p is sample p % n of epoch p // n, in that epoch's order, n being the samples of an epoch. The batch of a
step is the next ``num_accumulation * dp_size * local_batch_size`` positions. How they are shared out follows from
the layout and never enters the state, so another number of ranks reads the same samples at each step of the same
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from .errors import DataMismatch
from .order import mix64, shuffled
from .packing import NO_SAMPLE, PackedSamples

IGNORED_LABEL = -100
# The order is worked out for this many positions at once: a step of a few samples would pay for numpy's calls alone.
_ORDER_AHEAD = 4096


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step.

    tokens, labels: int64 (num_micro, local_batch, seq_len); labels are -100 where they are not to be learned.
    num_valid_tokens: labels that count, in this share. digest: this share's part of the step's digest; the parts of
    all ranks add up modulo 2**64. first_samples: position of each micro-batch's first sample. position: samples consumed
    when the step is done. positions: int64, of each token in its document, as tokens; None where that is not asked for.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_valid_tokens: int
    digest: int
    first_samples: list[int]
    position: int
    positions: torch.Tensor | None = None


def count_valid(labels: torch.Tensor) -> int:
    """How many of some labels on the host are to be learned."""
    return int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))


def chain(previous: int, digest: int) -> int:
    """The digest of all steps so far, from that of the steps before (0 at the start) and this step's; in [0, 2**64)."""
    return int(xxhash.xxh3_64_intdigest(previous.to_bytes(8, "little") + digest.to_bytes(8, "little")))


class TrainBatches:
    """Iterator of `Batch`. All ranks see StopIteration at the same step: when ``max_epochs`` are read (0: never).

    The step in which the last epoch ends is filled up with samples that are masked wholly: no token is lost, and its
    ``position`` is that of the end. ``sharing`` is (dp_rank, dp_size).
    """

    def __init__(
        self,
        samples: PackedSamples,
        *,
        fingerprint: Mapping[str, Any],
        shuffle_seed: int | None,
        max_epochs: int,
        local_batch_size: int,
        num_accumulation: int,
        sharing: tuple[int, int],
        with_positions: bool = False,
    ) -> None:
        self.fingerprint = dict(fingerprint)
        self.num_samples_per_epoch = samples.num_samples
        self._samples, self._with_positions = samples, with_positions
        self._shuffle_seed = shuffle_seed
        self._end = max_epochs * samples.num_samples if max_epochs else None
        self._position = 0
        self._ahead_from, self._ahead = 0, np.empty(0, np.int64)
        dp_rank, dp_size = sharing
        self._shape = (num_accumulation, local_batch_size)
        self._global_batch_size = num_accumulation * dp_size * local_batch_size
        first_of_micro = (np.arange(num_accumulation) * dp_size + dp_rank) * local_batch_size
        self._local = (first_of_micro[:, None] + np.arange(local_batch_size)).ravel()

    @property
    def position(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self._position

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Batch:
        first = self._position
        if self._end is not None and first >= self._end:
            raise StopIteration
        after = first + self._global_batch_size
        after = after if self._end is None else min(after, self._end)
        positions = first + self._local
        samples, with_positions = self._samples_of_step(), self._with_positions
        batch = assemble(self._samples, samples, positions, self._shape, position=after, with_positions=with_positions)
        self._position = after
        return batch

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """State of a run that has consumed ``position`` samples: the `position` of the last batch that was trained
        on, which need not be the last handed out. Without it, of all handed out. The same on every rank.
        """
        return {"position": self._position if position is None else position, "fingerprint": dict(self.fingerprint)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataMismatch, with every difference, if it is one of another stream."""
        missing = object()
        saved, here = state["fingerprint"], self.fingerprint
        differing = [key for key in sorted({*saved, *here}) if saved.get(key, missing) != here.get(key, missing)]
        if differing:
            lines = [
                f"  {key}: saved {saved.get(key, 'nothing')!r}, now {here.get(key, 'nothing')!r}" for key in differing
            ]
            raise DataMismatch(
                "the saved data position counts samples of another stream than the one configured now:\n"
                + "\n".join(lines)
                + "\nrestore these settings or files to continue the run, or start a new run from its weights "
                '(checkpoint.start = "warm", checkpoint.initial_load_path = the folder of the step)'
            )
        self._position = int(state["position"])

    def _samples_of_step(self) -> NDArray[np.int64]:
        """Sample index at each of this rank's positions of the step, NO_SAMPLE beyond the end."""
        first, behind = self._position, self._position + self._global_batch_size
        if not self._ahead_from <= first <= behind <= self._ahead_from + len(self._ahead):
            self._ahead_from = first
            self._ahead = self._samples_at(np.arange(first, max(behind, first + _ORDER_AHEAD)))
        samples: NDArray[np.int64] = self._ahead[first - self._ahead_from + self._local]
        return samples

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, within = np.divmod(positions, self.num_samples_per_epoch)
        samples = within
        if self._shuffle_seed is not None:
            samples = np.empty_like(within)
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
                chosen = epochs == epoch
                samples[chosen] = shuffled(within[chosen], self.num_samples_per_epoch, self._shuffle_seed, epoch)
        return samples if self._end is None else np.where(positions < self._end, samples, NO_SAMPLE)


def assemble(
    packed: PackedSamples,
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
    shape: tuple[int, int],
    *,
    position: int,
    with_positions: bool,
) -> Batch:
    """A batch of ``samples`` (rows,), which stand at ``positions`` (rows,) of the stream.

    shape: (num_micro, local_batch), with num_micro * local_batch = rows. with_positions: tell also where each token stands
    in its document.
    """
    rows, lengths = packed.read(samples)
    # One allocation for both: they go to the device together.
    both = torch.empty((2, *shape, packed.seq_len), dtype=torch.int64)
    tokens, labels = both.numpy().reshape(2, len(samples), packed.seq_len)
    tokens[:] = rows[:, :-1]
    labels[:] = rows[:, 1:]
    num_valid = np.maximum(lengths - 1, 0)
    for row in np.flatnonzero(num_valid < packed.seq_len):
        labels[row, num_valid[row] :] = IGNORED_LABEL
    ignored = packed.ignored_labels(samples)
    labels[ignored] = IGNORED_LABEL
    first_samples: list[int] = positions[:: shape[1]].tolist()
    num_valid_tokens = int(num_valid.sum()) - len(ignored[0])
    digest = _digest(rows, lengths, positions)
    in_documents = torch.from_numpy(packed.positions(samples)).view(both[0].shape) if with_positions else None
    return Batch(both[0], both[1], num_valid_tokens, digest, first_samples, position, in_documents)


def _digest(rows: NDArray[Any], lengths: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Sum over rows, modulo 2**64, of xxh3_64(real tokens as little-endian uint32, seed = mix64(position))."""
    seeds = mix64(positions.astype(np.uint64)).tolist()
    words = rows.astype("<u4", copy=False)
    total = 0
    for row, length, seed in zip(words, lengths.tolist(), seeds, strict=True):
        if length:
            total += xxhash.xxh3_64_intdigest(row[:length].data, seed)
    return total % 2**64
