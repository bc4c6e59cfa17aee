"""Training batches: the next samples of one global stream, whose only state is a position in it.

Which sample stands at a position is a formula (`mixture.SampleOrder`). The batch of a step is the next
``num_accumulation * dp_size * local_batch_size`` positions. How they are shared out follows from the layout and never
enters the state, so another number of ranks reads the same samples at each step of the same size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from .errors import DataMismatch
from .mixture import JoinedSamples, Origin, SampleOrder
from .order import mix64
from .packing import NO_SAMPLE, PackedSamples

logger = logging.getLogger()

IGNORED_LABEL = -100
# The order is worked out for this many positions at once: a step of a few samples would pay for numpy's calls alone.
_ORDER_AHEAD = 4096


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step.

    tokens, labels: int64 (num_micro, local_batch, seq_len); labels are -100 where they are not to be learned.
    num_valid_tokens: labels that count, in this share. digest: this share's part of the step's digest; the parts of
    all ranks add up modulo 2**64. first_samples: position of each micro-batch's first sample. position: where the
    stream is when the step is done. num_samples: those of the step over all ranks, without what fills it up. positions:
    int64, of each token in its document, as tokens; None where that is not asked for.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_valid_tokens: int
    digest: int
    first_samples: list[int]
    position: int
    num_samples: int
    positions: torch.Tensor | None = None


def count_valid(labels: torch.Tensor) -> int:
    """How many of some labels on the host are to be learned."""
    return int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))


def chain(previous: int, digest: int) -> int:
    """The digest of all steps so far, from that of the steps before (0 at the start) and this step's; in [0, 2**64)."""
    return int(xxhash.xxh3_64_intdigest(previous.to_bytes(8, "little") + digest.to_bytes(8, "little")))


class TrainBatches:
    """Iterator of `Batch`. All ranks see StopIteration at the same step: at the end of ``order``, if it has one.

    The step in which the stream ends is filled up with samples that are masked wholly: no token is lost, and its
    ``position`` is that of the end. ``sharing`` is (dp_rank, dp_size). ``skipped`` are ranges of positions that are left
    out. ``allow_change`` are patterns of what may differ between a saved fingerprint and this one.
    """

    def __init__(
        self,
        samples: JoinedSamples,
        order: SampleOrder,
        *,
        fingerprint: Mapping[str, Any],
        local_batch_size: int,
        num_accumulation: int,
        sharing: tuple[int, int],
        with_positions: bool = False,
        skipped: Sequence[range] = (),
        allow_change: Sequence[str] = (),
    ) -> None:
        self.fingerprint = dict(fingerprint)
        self.order = order
        self.changes: list[str] = []  # what differs from the data of the checkpoint, where that is allowed
        self._samples, self._with_positions = samples, with_positions
        self._skipped, self._allow_change = skipped, allow_change
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
        whole, end = self.next_positions(), self.order.end
        if end is not None and whole[0] >= end:
            raise StopIteration
        after = int(whole[-1]) + 1
        samples = self._samples_at(whole)
        batch = assemble(
            self._samples,
            samples[self._local],
            whole[self._local],
            self._shape,
            position=after if end is None else min(after, end),
            num_samples=int(np.count_nonzero(samples != NO_SAMPLE)),
            with_positions=self._with_positions,
        )
        self._position = batch.position
        return batch

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """State of a run that has consumed ``position`` samples: the `position` of the last batch that was trained
        on, which need not be the last handed out. Without it, of all handed out. The same on every rank.
        """
        position = self._position if position is None else position
        origin = self.order.origin
        return {
            "position": position,
            "counts": self.order.counts_at(position),
            "origin": {"position": origin.position, "counts": dict(origin.counts)},
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataMismatch, with every difference, if it is one of another stream.

        Where the differences are allowed, every source goes on behind its last sample: the pattern begins anew there.
        """
        position, counts = int(state["position"]), _counts_of(state)
        differing = self.check_state(state)
        self.order.start_at(_origin_of(state))
        if differing:
            logger.warning(
                f"The data changed since the checkpoint, as data.allow_change permits: {', '.join(differing)}; "
                f"each source goes on behind the samples that were read of it: {dict(counts)}"
            )
            self.order.start_at(Origin(position, counts))
        self.changes = differing
        self._position = position
        self._ahead_from, self._ahead = 0, np.empty(0, np.int64)

    def check_state(self, state: Mapping[str, Any]) -> list[str]:
        """What differs between a saved stream and this one. Raises DataMismatch if any of it is not allowed."""
        position, counts = int(state["position"]), _counts_of(state)
        missing = object()
        saved, here = dict(state["fingerprint"]), dict(self.fingerprint)
        if saved == here:
            # What the fingerprint leaves out, as max_epochs, may have moved samples before this position.
            now = self.order.starting_at(_origin_of(state)).counts_at(position)
            saved["samples read"], here["samples read"] = dict(counts), now
        differing = [key for key in sorted({*saved, *here}) if saved.get(key, missing) != here.get(key, missing)]
        refused = [key for key in differing if not any(fnmatchcase(key, name) for name in self._allow_change)]
        if refused:
            lines = (
                f"  {key}: saved {saved.get(key, 'nothing')!r}, now {here.get(key, 'nothing')!r}" for key in differing
            )
            raise DataMismatch(
                "the saved data position counts samples of another stream than the one configured now:\n"
                + "\n".join(lines)
                + "\nrestore these settings or files to continue the run; accept them with "
                f"data.allow_change = {json.dumps(refused)}; or start a new run from its weights "
                '(checkpoint.start = "warm", checkpoint.initial_load_path = the folder of the step)'
            )
        return differing

    def pass_over(self, num_steps: int) -> None:
        """Go on by so many steps without reading them."""
        for _ in range(num_steps):
            self._position = int(self.next_positions()[-1]) + 1

    def next_positions(self) -> NDArray[np.int64]:
        """The next positions that are not left out, of all ranks: (global batch size,)."""
        pieces, position, missing = [], self._position, self._global_batch_size
        while missing:
            for left_out in self._skipped:
                if position in left_out:
                    position = left_out.stop
            stop = min(
                [position + missing, *(left_out.start for left_out in self._skipped if left_out.start > position)]
            )
            pieces.append(np.arange(position, stop))
            position, missing = stop, missing - (stop - position)
        return np.concatenate(pieces)

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample number at each of the positions of a step, NO_SAMPLE beyond the end."""
        first, behind = int(positions[0]), int(positions[-1]) + 1
        if behind - first > len(positions):  # some between them are left out
            return self.order.samples_at(positions)
        if not self._ahead_from <= first <= behind <= self._ahead_from + len(self._ahead):
            self._ahead_from = first
            self._ahead = self.order.samples_at(np.arange(first, max(behind, first + _ORDER_AHEAD)))
        return self._ahead[positions - self._ahead_from]


def _counts_of(state: Mapping[str, Any]) -> Mapping[str, int]:
    """Samples read of each source; a state from before there were mixtures knows of one without a name."""
    counts: Mapping[str, int] = state.get("counts", {"": int(state["position"])})
    return counts


def _origin_of(state: Mapping[str, Any]) -> Origin:
    origin = state.get("origin", {"position": 0, "counts": {}})
    return Origin(int(origin["position"]), origin["counts"])


def assemble(
    packed: PackedSamples | JoinedSamples,
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
    shape: tuple[int, int],
    *,
    position: int,
    num_samples: int,
    with_positions: bool,
) -> Batch:
    """A batch of ``samples`` (rows,), which stand at ``positions`` (rows,) of the stream.

    shape: (num_micro, local_batch), with num_micro * local_batch = rows. position, num_samples: those of the `Batch`.
    with_positions: tell also where each token stands
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
    return Batch(both[0], both[1], num_valid_tokens, digest, first_samples, position, num_samples, in_documents)


def _digest(rows: NDArray[Any], lengths: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Sum over rows, modulo 2**64, of xxh3_64(real tokens as little-endian uint32, seed = mix64(position))."""
    seeds = mix64(positions.astype(np.uint64)).tolist()
    words = rows.astype("<u4", copy=False)
    total = 0
    for row, length, seed in zip(words, lengths.tolist(), seeds, strict=True):
        if length:
            total += xxhash.xxh3_64_intdigest(row[:length].data, seed)
    return total % 2**64
