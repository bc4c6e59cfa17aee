"""Which positions of the stream a step reads: the next ones, as many as its batch has, but for what is left out.

A run that leaves nothing out begins its steps on a grid of positions, as wide as the batches are. Ranges of steps that are
left out (``training.skip_steps``) are ranges of that grid; a position between its points, after a change of the batch size,
is read on from all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StepPositions:
    """sizes: (first step, samples per step) for each batch size, from step 1 on. skip_steps: see `Training`."""

    def __init__(self, sizes: Sequence[tuple[int, int]], skip_steps: Sequence[Sequence[int]] = ()) -> None:
        self.sizes = tuple(sizes)
        self._levels = [(0, 0, sizes[0][1])]  # steps and positions before, samples per step
        for first, size in sizes[1:]:
            steps, position, before = self._levels[-1]
            self._levels.append((first - 1, position + (first - 1 - steps) * before, size))
        self._skip_steps, self._skipped = skip_steps, list[range]()
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
