"""Training batches: the next samples of one global stream, whose only state is a position in it.

Which sample stands at a position is a formula (`mixture.SampleOrder`), and so is which positions a step reads
(`steps.StepPositions`). How they are shared out follows from the layout and never enters the state, so another number of
ranks reads the same samples at each step of the same size.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.batches.batch import Batch, Plan
from torchtitan_like.data.batches.validation import ValidationBatches
from torchtitan_like.data.batches.workers import PlannedBatches, reader
from torchtitan_like.data.errors import DataMismatch
from torchtitan_like.data.samples.mixture import Origin, SampleOrder
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples
from torchtitan_like.data.samples.streaming import StreamedSamples

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataLoader

logger = logging.getLogger()

# The order is worked out for this many positions at once: a step of a few samples would pay for numpy's calls alone.
_ORDER_AHEAD = 4096


class StepPositions:
    """sizes: (first step, samples per step) for each batch size, from step 1 on. skip_steps: see `Training`."""

    def __init__(self, sizes: Sequence[tuple[int, int]], skip_steps: Sequence[Sequence[int]] = ()) -> None:
        self.sizes = tuple(sizes)
        self._levels = [(0, 0, sizes[0][1])]  # steps and positions before, samples per step
        for first, size in sizes[1:]:
            steps, position, before = self._levels[-1]
            self._levels.append((first - 1, position + (first - 1 - steps) * before, size))
        self._skip_steps = skip_steps
        self._skipped: list[range] = []
        num_skipped = 0
        for first, last in skip_steps:
            begin = first - 1 + num_skipped
            num_skipped += last - first + 1
            self._skipped.append(range(self._grid(begin), self._grid(first - 1 + num_skipped)))

    def first_of(self, step: int) -> int:
        """The position at which ``step`` begins to read."""
        return self._grid(step - 1 + sum(last - first + 1 for first, last in self._skip_steps if first <= step))

    def num_begun(self, position: int) -> int:
        """How many steps begin before ``position``."""
        left_out = (range(r.start, min(r.stop, position)) for r in self._skipped if r.start < position)
        return self._num_of_grid(position) - sum(
            self._num_of_grid(r.stop) - self._num_of_grid(r.start) for r in left_out
        )

    def next_from(self, position: int) -> NDArray[np.int64]:
        """The positions that a step reads when all before ``position`` has been read or left out: (samples,)."""
        pieces, missing = [], None
        while missing != 0:
            for left_out in self._skipped:
                if position in left_out:
                    position = left_out.stop
            if missing is None:
                missing = self._level_of(position)[2]
            stop = min([position + missing, *(r.start for r in self._skipped if r.start > position)])
            pieces.append(np.arange(position, stop))
            position, missing = stop, missing - (stop - position)
        return np.concatenate(pieces)

    def _grid(self, num_steps: int) -> int:
        """The position behind so many steps that leave nothing out."""
        steps, position, size = self._levels[bisect_right(self._levels, num_steps, key=lambda level: level[0]) - 1]
        return position + (num_steps - steps) * size

    def _num_of_grid(self, position: int) -> int:
        """How many points of the grid lie before ``position``."""
        steps, start, size = self._level_of(max(position - 1, 0))
        return steps - (start - position) // size

    def _level_of(self, position: int) -> tuple[int, int, int]:
        return self._levels[bisect_right(self._levels, position, key=lambda level: level[1]) - 1]


class TrainBatches:
    """Iterator of `Batch`. All ranks see StopIteration at the same step: at the end of ``order``, if it has one.

    The step in which the stream ends is filled up with samples that are masked wholly: no token is lost, and its
    ``position`` is that of the end. ``sharing`` is (dp_rank, dp_size); a step's samples are a multiple of
    ``local_batch_size`` for each. ``allow_change`` are patterns of what may differ between a saved fingerprint and this one.
    ``dataloader``: workers.
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
    ) -> None:
        self.fingerprint = dict(fingerprint)
        self.order, self.steps = order, steps
        self.changes: list[str] = []  # what differs from the data of the checkpoint, where that is allowed
        self._allow_change, self._dataloader = allow_change, dataloader
        self._reader: Iterator[Batch] | None = None
        # Where the stream is, behind all samples handed out so far over all ranks and those left out before them.
        self.position = 0
        self._ahead_from, self._ahead = 0, np.empty(0, np.int64)
        by_key = zip(order.supplies, samples.parts, strict=True)
        self._streams = {supply.key: part for supply, part in by_key if isinstance(part, StreamedSamples)}
        self._batches = PlannedBatches(samples, local_batch_size, with_positions=with_positions)
        self._sharing, self._local_batch_size = sharing, local_batch_size

    @property
    def sources(self) -> list[str]:
        """The names of those that labels tell apart, by their number there; none where there is only one."""
        names = [supply.key for supply in self.order.supplies]
        return names if len(names) > 1 else []

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Batch:
        if self._reader is None:
            self._reader = reader(self._batches, self._plans, self._dataloader)()
        batch = self._follow(next(self._reader)) if self._streams else next(self._reader)
        self.position = batch.position
        return batch

    def _follow(self, batch: Batch) -> Batch:
        """Let the streams go on to the end of a step; the batch as it is where the text ends in it. Raises StopIteration.

        What lies before this step is not needed any more: no rank begins a step before all have read the one before it.
        """
        end = batch.position
        before, behind = self.order.counts_at(self.position), self.order.counts_at(end)
        for key, stream in self._streams.items():
            end -= behind[key] - stream.advance(behind[key])  # only a stream that is alone has an end
            stream.delete_before(before[key])
        if end == batch.position:
            return batch
        num_samples = int(np.count_nonzero(self.next_positions() < end))
        if not num_samples:
            raise StopIteration
        return replace(batch, position=end, num_samples=num_samples)

    def _plans(self) -> Iterator[Plan]:
        """What this rank reads in the steps from here on."""
        position, end = self.position, self.order.end
        while True:
            whole = self.steps.next_from(position)
            if end is not None and whole[0] >= end:
                return
            position = int(whole[-1]) + 1
            position = position if end is None else min(position, end)
            samples = self._samples_at(whole)
            num_samples = int(np.count_nonzero(samples != NO_SAMPLE))
            local = (
                np.arange(len(whole)).reshape(-1, self._sharing[1], self._local_batch_size)[:, self._sharing[0]].ravel()
            )
            yield Plan(samples[local], whole[local], position, num_samples)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """State of a run that has consumed ``position`` samples: the `position` of the last batch that was trained
        on, which need not be the last handed out. Without it, of all handed out. The same on every rank.
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
        """Go to a saved position. Raises DataMismatch, with every difference, if it is one of another stream.

        Where the differences are allowed, every source goes on behind its last sample: the pattern begins anew there.
        """
        position, counts = int(state["position"]), _counts_of(state)
        self.changes = differing = self.check_state(state)
        self.order.start_at(_origin_of(state))
        if differing:
            logger.warning(
                f"The data changed since the checkpoint, as data.allow_change permits: {', '.join(differing)}; "
                f"each source goes on behind as many samples as were read of it: {dict(counts)}"
            )
            self.order.start_at(Origin(position, counts))
        for key, stream in self._streams.items():
            stream.go_to(*state.get("cursors", {}).get(key, (0, counts.get(key, 0))))
        self._go_to(position)

    def check_state(self, state: Mapping[str, Any]) -> list[str]:
        """What differs between a saved stream and this one. Raises DataMismatch if any of it is not allowed."""
        position, counts = int(state["position"]), _counts_of(state)
        saved, here = dict(state["fingerprint"]), dict(self.fingerprint)
        if saved == here:
            # What the fingerprint leaves out, as max_epochs, may have moved samples before this position.
            now = self.order.starting_at(_origin_of(state)).counts_at(position)
            saved["samples read"], here["samples read"] = dict(counts), now
        differing = _differing(saved, here)
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

    def check_ranks(self, gather: Callable[[Any], list[Any]], validation: Mapping[str, ValidationBatches]) -> None:
        """A collective. Raises DataMismatch, on all ranks, unless they read the same texts: nodes may have their own copies."""
        texts = {f"validation {name}".strip(): batches.identity for name, batches in validation.items()}
        ours = {**self.fingerprint, **texts}
        if len(set(gather(xxhash.xxh3_128_hexdigest(json.dumps(ours, sort_keys=True).encode())))) == 1:
            return  # of thousands of ranks all that is known of the texts would be hundreds of megabytes
        first, *others = gather(ours)
        for rank, other in enumerate(others, start=1):
            for key in _differing(first, other):
                told = f"{key} is {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}"
                raise DataMismatch(f"the ranks would read different texts: {told}; give every node the same files")

    def pass_over(self, num_steps: int) -> None:
        """Go on by so many steps without reading them."""
        position = self.position
        for _ in range(num_steps):
            position = int(self.steps.next_from(position)[-1]) + 1
        self._go_to(position)

    def next_positions(self) -> NDArray[np.int64]:
        """The positions that the next step reads, on all ranks: (samples,)."""
        return self.steps.next_from(self.position)

    def _go_to(self, position: int) -> None:
        self.position, self._reader = position, None
        self._ahead_from, self._ahead = 0, np.empty(0, np.int64)

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample number at each of the positions of a step, NO_SAMPLE beyond the end."""
        first, behind = int(positions[0]), int(positions[-1]) + 1
        if behind - first > len(positions):  # some between them are left out
            return self.order.samples_at(positions)
        if not self._ahead_from <= first <= behind <= self._ahead_from + len(self._ahead):
            self._ahead_from = first
            self._ahead = self.order.samples_at(np.arange(first, max(behind, first + _ORDER_AHEAD)))
        return self._ahead[positions - self._ahead_from]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    missing = object()
    return [key for key in sorted({*one, *other}) if one.get(key, missing) != other.get(key, missing)]


def _counts_of(state: Mapping[str, Any]) -> Mapping[str, int]:
    """Samples read of each source; a state from before there were mixtures knows of one without a name."""
    return dict(state.get("counts", {"": int(state["position"])}))


def _origin_of(state: Mapping[str, Any]) -> Origin:
    origin = state.get("origin", {"position": 0, "counts": {}})
    return Origin(int(origin["position"]), origin["counts"])
