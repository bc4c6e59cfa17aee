"""Write replay bundles, from which `titan run replay` repeats a non-finite step or a spike.

docs/reference/metrics.md lists the keys of a bundle. `replay` reads them.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.monitor.log import logger
from torchtitan_like.resilience.nonfinite import HISTORY
from torchtitan_like.resolved import RankRun
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.jsonl import encode
from torchtitan_like.util.run_directory import (
    BAD_STEPS,
    PIN,
)

# For skipped steps of one attempt. Pinned checkpoints are never deleted, and disks are finite.
MOST_PINS = 3


class ReplayBundleWriter:
    """Writes `attempts/<n>/bad-steps/step-<k>.json`. Only rank 0 has one.

    | step | bundle |
    | --- | --- |
    | skipped non-finite steps | for the first of several in a row |
    | non-finite step that stops the run | for that step |
    | spike | for its first step |

    Each bundle names the checkpoint to replay from, and pins it.

    """

    def __init__(self, run: RankRun, batches: TrainBatches) -> None:
        self._attempt = run.attempt
        self._checkpointer = run.checkpointer
        self._batches = batches
        self._start = run.origin.start
        self._seed = run.seed
        self._policy = run.config.resilience.on_nonfinite
        self._failures = run.attempt.failures
        # A run with frozen updates stops before it makes more rows.
        self._nonfinite_rows: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self._num_pins = 0

    def observe(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Keep the rows of non-finite steps. Write a bundle for the first skipped step in a row."""
        for row in rows:
            # A finite norm belongs to a skipped spike.
            if row["skipped"] and not math.isfinite(row["grad_norm"]):
                is_first = (
                    not self._nonfinite_rows or self._nonfinite_rows[-1]["step"] != row["step"] - 1
                )
                self._nonfinite_rows.append(row)
                if is_first and self._policy == "skip":
                    self.write(row["step"], MOST_PINS)

    def write(self, step: int, most_pins: int = sys.maxsize) -> None:
        """Pin the checkpoint before a non-finite step and write its bundle. Does not block.

        The checkpoint is pinned unless this attempt has pinned `most_pins`.
        """
        row = next(row for row in self._nonfinite_rows if row["step"] == step)
        self._checkpointer.find_previous(step, partial(self._write_nonfinite, row, most_pins))

    def write_spike(self, row: Mapping[str, Any], limits: dict[str, float]) -> None:
        """Write the bundle of a spike's first step, with the limits. Does not block.

        `SpikeDetector` pins the checkpoint. A non-finite step has its own bundle.
        """
        if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
            write = partial(self._write_spike, {**row, "spike": limits})
            self._checkpointer.find_previous(row["step"], write)

    # ---- on the checkpoint thread, which also deletes checkpoints: no deletion runs at the same
    # time

    def _write_nonfinite(
        self, row: Mapping[str, Any], most_pins: int, checkpoint: Path | None
    ) -> None:
        path = self._path(row["step"])
        if checkpoint is not None and self._num_pins < most_pins:
            with self._failures.recording(checkpoint / PIN):
                (checkpoint / PIN).write_text(f"{path}\n", encoding="utf-8")
                self._num_pins += 1
        is_pinned = checkpoint is not None and (checkpoint / PIN).exists()
        self._write(path, row, self._describe(checkpoint, is_pinned), "bad_step", logging.ERROR)

    def _write_spike(self, row: Mapping[str, Any], checkpoint: Path | None) -> None:
        # An empty pin may belong to the spike, and is removed if the spike is short.
        pin = None if checkpoint is None else checkpoint / PIN
        is_pinned = pin is not None and pin.exists() and bool(pin.read_bytes())
        entry = self._describe(checkpoint, is_pinned)
        self._write(self._path(row["step"]), row, entry, "spike_bundle", logging.WARNING)

    def _path(self, step: int) -> Path:
        return self._attempt.folder / BAD_STEPS / f"step-{step}.json"

    def _describe(self, checkpoint: Path | None, is_pinned: bool) -> dict[str, Any]:
        """Return the bundle's entry for the checkpoint; None: the start of the attempt."""
        start = self._start
        if checkpoint is not None:
            path: str | None = os.path.relpath(checkpoint, self._attempt.run)
        else:
            path = None if start.path is None else str(start.path.absolute())
        is_start = checkpoint is None or checkpoint == start.path
        return {
            "kind": start.kind if is_start else "resume",
            "path": path,
            "is_start": is_start,
            "is_pinned": is_pinned,
        }

    def _samples(self, position: int) -> list[list[int]]:
        """Return [first, last] of each stretch of positions that the step at `position` read."""
        positions = self._batches.steps.positions_from(position)
        end = self._batches.order.end
        if end is not None:
            positions = positions[positions < end]
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        return [stretch[[0, -1]].tolist() for stretch in stretches]

    def _write(
        self, path: Path, row: Mapping[str, Any], checkpoint: dict[str, Any], event: str, level: int
    ) -> None:
        bundle = {
            **row,
            "seed": self._seed,
            "policy": self._policy,
            "global_batch_size": self._batches.steps.sizes[-1][1],
            "config": f"attempts/{self._attempt.number}/config.toml",
            "samples": self._samples(row["position"]),
            "checkpoint": checkpoint,
        }
        with self._failures.recording(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, encode(bundle))
            logger.log(level, f"Replay step {row['step']}: titan run replay {path}")
        self._attempt.event(event, step=row["step"], bundle=str(path), checkpoint=checkpoint)
