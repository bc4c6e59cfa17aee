"""The batches of a rank: which samples each step, or each evaluation, reads.

*Training* reads one global stream, whose only state is a position. `SampleOrder` maps positions to
samples, and `StepPositions` maps steps to positions. Both are closed formulas. The layout only
divides the samples of a step among ranks and is not part of the state: any number of ranks reads
the same samples in a step of the same size.

*Validation* reads the same samples in every evaluation and on every layout. Batch b has the samples
[b * local_batch_size, (b + 1) * local_batch_size) of the dataset in file order. Rank r of n reads
the batches r, r + n, r + 2n, ... The samples, and therefore the token-weighted mean of their loss,
do not depend on n.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.batches.batch import Batch, Plan, PlannedBatches, make_reader
from torchtitan_like.data.data_errors import DataMismatch, ReadInterrupted
from torchtitan_like.data.samples.order import Origin, SampleOrder
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples
from torchtitan_like.data.samples.streaming import StreamedSamples

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader

logger = logging.getLogger()

# Number of positions for which the order is computed at once. For a step of a few samples, the
# overhead of numpy's calls would dominate.
_ORDER_AHEAD = 4096


class StepPositions:
    """The positions of the stream that each step reads.

    sizes: (first step, samples per step) for each batch size; the first one starts at step 1.
    skip_steps: see `Training`.

    The *grid* has the positions at which steps start if no step is skipped: then step k reads the
    positions from grid point k - 1 up to grid point k.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, int]], skip_steps: Sequence[Sequence[int]] = ()
    ) -> None:
        self.sizes = tuple(sizes)
        self._levels = [(0, 0, sizes[0][1])]  # steps and positions before, samples per step
        for first, size in sizes[1:]:
            steps, position, before = self._levels[-1]
            self._levels.append((first - 1, position + (first - 1 - steps) * before, size))
        self._skip_steps = skip_steps
        self._skipped: list[range] = []
        num_skipped = 0
        for first, last in skip_steps:
            start = first - 1 + num_skipped
            num_skipped += last - first + 1
            self._skipped.append(range(self._grid(start), self._grid(first - 1 + num_skipped)))

    def first_position(self, step: int) -> int:
        """Return the first position that ``step`` reads."""
        skipped = [last - first + 1 for first, last in self._skip_steps if first <= step]
        return self._grid(step - 1 + sum(skipped))

    def num_started(self, position: int) -> int:
        """Return the number of steps that start before ``position``."""
        skipped = (
            range(r.start, min(r.stop, position)) for r in self._skipped if r.start < position
        )
        return self._num_grid_points(position) - sum(
            self._num_grid_points(r.stop) - self._num_grid_points(r.start) for r in skipped
        )

    def positions_from(self, position: int) -> NDArray[np.int64]:
        """Return the positions (samples,) of the step that starts at or after ``position``."""
        pieces, num_missing = [], None
        while num_missing != 0:
            for skipped in self._skipped:
                if position in skipped:
                    position = skipped.stop
            if num_missing is None:
                num_missing = self._level_of(position)[2]
            next_skips = [r.start for r in self._skipped if r.start > position]
            stop = min([position + num_missing, *next_skips])
            pieces.append(np.arange(position, stop))
            num_missing -= stop - position
            position = stop
        return np.concatenate(pieces)

    def position_after(self, position: int, num_steps: int) -> int:
        """Return the position after ``num_steps`` steps that start at or after ``position``."""
        while num_steps:
            positions = self.positions_from(position)
            first, size = int(positions[0]), len(positions)
            # Steps up to the next batch size or skipped range are equal: pass them at once.
            borders = [start for _, start, _ in self._levels] + [r.start for r in self._skipped]
            border = min((start for start in borders if start > first), default=None)
            num_equal = num_steps if border is None else min(num_steps, (border - first) // size)
            position = first + num_equal * size if num_equal else int(positions[-1]) + 1
            num_steps -= max(1, num_equal)
        return position

    def _grid(self, num_steps: int) -> int:
        """Return the position after ``num_steps`` steps if no step is skipped."""
        index = bisect_right(self._levels, num_steps, key=lambda level: level[0]) - 1
        steps, position, size = self._levels[index]
        return position + (num_steps - steps) * size

    def _num_grid_points(self, position: int) -> int:
        """Return the number of grid points before ``position``."""
        steps, start, size = self._level_of(max(position - 1, 0))
        return steps - (start - position) // size

    def _level_of(self, position: int) -> tuple[int, int, int]:
        return self._levels[bisect_right(self._levels, position, key=lambda level: level[1]) - 1]


class TrainBatches:
    """Iterator of `Batch`. All ranks raise StopIteration at the same step, at the end of ``order``.

    The step in which the stream ends is padded with samples whose labels are all ignored. No token
    is lost, and ``position`` of its batch is the end of the stream.

    sharing: (dp_rank, dp_size). Each rank's part of a step is a multiple of ``local_batch_size``.
    replica_group: (index, number of groups). Each group reads one part of each step.
    dataloader: number of worker processes, and prefetching.
    allow_change: name patterns of fingerprint entries that may differ from a checkpoint's.
    """

    def __init__(
        self,
        samples: JoinedSamples,
        order: SampleOrder,
        steps: StepPositions,
        *,
        fingerprint: Mapping[str, Any],
        local_batch_size: int,
        sharing: tuple[int, int],
        with_positions: bool,
        dataloader: DataLoader,
        allow_change: Sequence[str] = (),
        replica_group: tuple[int, int] = (0, 1),
    ) -> None:
        self.fingerprint = dict(fingerprint)
        self.order = order
        self.steps = steps
        self.changes: list[str] = []  # permitted differences from the data of the checkpoint
        self._allow_change = allow_change
        self._dataloader = dataloader
        self._reader: Iterator[Batch] | None = None
        # Returns True if the run is to stop. A batch that is late then raises ReadInterrupted.
        self.is_interrupted: Callable[[], bool] = lambda: False
        # The position after all samples that any rank has read or skipped.
        self.position = 0
        self._ahead_from = 0
        self._ahead: NDArray[np.int64] = np.empty(0, np.int64)
        by_key = zip(order.supplies, samples.parts, strict=True)
        self._streams = {
            supply.key: part for supply, part in by_key if isinstance(part, StreamedSamples)
        }
        self._batches = PlannedBatches(samples, local_batch_size, with_positions=with_positions)
        self._sharing = sharing
        self._replica_group = replica_group
        self._local_batch_size = local_batch_size

    @property
    def sources(self) -> list[str]:
        """The names of the sources by number; empty if there is only one source."""
        names = [supply.key for supply in self.order.supplies]
        return names if len(names) > 1 else []

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Batch:
        if self._reader is None:
            self._reader = make_reader(
                self._batches, self._plans, self._dataloader, lambda: self.is_interrupted()
            )()
        batch = next(self._reader)
        if self._streams:
            batch = self._advance_streams(batch)
        self.position = batch.position
        return batch

    def _advance_streams(self, batch: Batch) -> Batch:
        """Advance the streamed sources to the end of the step.

        Returns the batch with the actual end of the stream. Raises StopIteration if the stream
        ended before this step. Windows before this step are deleted: no rank starts a step before
        all ranks have read the step before it.
        """
        end = batch.position
        counts_before, counts_after = self.order.counts_at(self.position), self.order.counts_at(end)
        for key, stream in self._streams.items():
            # A stream has an end only if it is the only source.
            end -= counts_after[key] - stream.advance(counts_after[key])
            stream.delete_before(counts_before[key])
        if end == batch.position:
            return batch
        num_samples = int(np.count_nonzero(self.next_positions() < end))
        if not num_samples:
            raise StopIteration
        return replace(batch, position=end, num_samples=num_samples)

    def _plans(self) -> Iterator[Plan]:
        """Yield this rank's plan for each step from the current position on."""
        position, end = self.position, self.order.end
        dp_rank, dp_size = self._sharing
        while True:
            positions = self.steps.positions_from(position)
            if end is not None and positions[0] >= end:
                return
            position = int(positions[-1]) + 1
            position = position if end is None else min(position, end)
            samples = self._samples_at(positions)
            rows = self._rows_of_group(len(positions))
            num_samples = int(np.count_nonzero(samples[rows] != NO_SAMPLE))
            local_rows = rows.reshape(-1, dp_size, self._local_batch_size)[:, dp_rank].ravel()
            yield Plan(samples[local_rows], positions[local_rows], position, num_samples)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return the state of a run that has trained on all samples before ``position``.

        position: `Batch.position` of the last trained batch; None: of the last batch that this
        iterator returned. The state is equal on every rank.
        """
        position = self.position if position is None else position
        origin, counts = self.order.origin, self.order.counts_at(position)
        return {
            "position": position,
            "counts": counts,
            "origin": {"position": origin.position, "counts": dict(origin.counts)},
            "fingerprint": dict(self.fingerprint),
            "cursors": {key: stream.cursor(counts[key]) for key, stream in self._streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position. Raises DataMismatch, with every difference, for another stream.

        If all differences are allowed, every source continues after its last sample, and the
        mixture pattern restarts.
        """
        position, counts = state["position"], state["counts"]
        self.changes = self.check_state(state)
        self.order.start_at(Origin(**state["origin"]))
        if self.changes:
            logger.warning(
                "The data changed since the checkpoint, as data.allow_change permits: "
                f"{', '.join(self.changes)}. Each source continues after the samples that were "
                f"read: {dict(counts)}"
            )
            self.order.start_at(Origin(position, counts))
        for key, stream in self._streams.items():
            stream.go_to(*state["cursors"].get(key, (0, counts.get(key, 0))))
        self._go_to(position)

    def check_state(self, state: Mapping[str, Any]) -> list[str]:
        """Return the differing fingerprint entries between a saved stream and this one.

        Raises DataMismatch if any difference is not allowed.
        """
        saved, current = dict(state["fingerprint"]), dict(self.fingerprint)
        if saved == current:
            # Settings outside the fingerprint, such as max_epochs, may have moved earlier samples.
            saved["samples read"] = state["counts"]
            order = self.order.with_origin(Origin(**state["origin"]))
            current["samples read"] = order.counts_at(state["position"])
        differing = _differing_keys(saved, current)
        refused = [
            key
            for key in differing
            if not any(fnmatchcase(key, pattern) for pattern in self._allow_change)
        ]
        if refused:
            lines = (
                f"  {key}: saved {saved.get(key, 'nothing')!r}, now {current.get(key, 'nothing')!r}"
                for key in differing
            )
            raise DataMismatch(
                "the data differ from the data of the checkpoint:\n"
                + "\n".join(lines)
                + "\nExpected the same settings and files: restore them to continue the run; "
                f"accept them with data.allow_change = {json.dumps(refused)}; or start a new run "
                "from the "
                'weights (checkpoint.start = "warm", checkpoint.initial_load_path = the folder of '
                "the step)"
            )
        return differing

    def check_ranks(
        self,
        gather: Callable[[Any], list[Any]],
        validation: Mapping[str, ValidationBatches],
    ) -> None:
        """Raise DataMismatch on all ranks unless they read the same datasets. A collective.

        Nodes may have their own copies of a dataset.
        """
        validation_identities = {
            f"validation {name}".strip(): batches.identity for name, batches in validation.items()
        }
        fingerprint = {**self.fingerprint, **validation_identities}
        content = json.dumps(fingerprint, sort_keys=True).encode()
        # Compare hashes first: the fingerprints of thousands of ranks take hundreds of megabytes.
        if len(set(gather(xxhash.xxh3_128_hexdigest(content)))) == 1:
            return
        first, *others = gather(fingerprint)
        for rank, other in enumerate(others, start=1):
            for key in _differing_keys(first, other):
                raise DataMismatch(
                    f"ranks read different datasets: {key} is {first.get(key)!r} on rank 0, "
                    f"{other.get(key)!r} on rank {rank}. Expected equal files: copy them to every "
                    "node"
                )

    def seek(self, position: int) -> None:
        """Continue with the step that starts at ``position``. Not for streamed sources."""
        self._go_to(position)

    def skip(self, num_steps: int) -> None:
        """Advance by ``num_steps`` steps without reading them."""
        self._go_to(self.steps.position_after(self.position, num_steps))

    def next_positions(self) -> NDArray[np.int64]:
        """Return the positions (samples,) that the replica group reads in the next step."""
        positions = self.steps.positions_from(self.position)
        return positions[self._rows_of_group(len(positions))]

    def _rows_of_group(self, num_rows: int) -> NDArray[np.int64]:
        """Return the numbers of the replica group's rows in a step of `num_rows`.

        They do not depend on the layout of the group, which may change in a restart.
        """
        group, num_groups = self._replica_group
        size = num_rows // num_groups
        return np.arange(group * size, (group + 1) * size)

    def _go_to(self, position: int) -> None:
        self.position = position
        self._reader = None
        self._ahead_from = 0
        self._ahead = np.empty(0, np.int64)

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample number at each position of a step, NO_SAMPLE after the end."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        if end - first > len(positions):  # positions between them are skipped
            return self.order.samples_at(positions)
        if not self._ahead_from <= first <= end <= self._ahead_from + len(self._ahead):
            self._ahead_from = first
            self._ahead = self.order.samples_at(np.arange(first, max(end, first + _ORDER_AHEAD)))
        return self._ahead[positions - self._ahead_from]


def _differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    missing = object()
    return [
        key for key in sorted({*one, *other}) if one.get(key, missing) != other.get(key, missing)
    ]


# ---- validation


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
        dp_rank, dp_size = sharing
        self._dp_rank = dp_rank
        self._dp_size = dp_size
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
