"""Write replay bundles: files from which `titan run replay` runs a bad step again."""

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

from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.retention import PIN
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.data.batches.training import TrainBatches
from torchtitan_like.monitor.attempt import Attempt
from torchtitan_like.monitor.log import logger
from torchtitan_like.util.files import WriteFailures, write_atomically
from torchtitan_like.util.jsonl import encode
from torchtitan_like.util.run_directory import BAD_STEPS

MOST_PINS = 3  # for steps that are skipped, by one attempt: a pinned checkpoint stays for ever, and disks are finite


class BadSteps:
    """Writes ``attempts/<n>/bad-steps/step-<k>.json`` of non-finite steps and of spikes. On rank 0 alone.

    A run that skips non-finite steps has one for the first of several in a row; a run that halts,
    one for the step at which it did. A spike has one for its first step.
    ``start``: what the attempt began from. ``known`` goes into each; its "policy" is `resilience.on_nonfinite`.
    """

    def __init__(
        self,
        attempt: Attempt,
        checkpointer: Checkpointer,
        batches: TrainBatches,
        start: Start,
        known: dict[str, Any],
        failures: WriteFailures,
    ) -> None:
        self._attempt = attempt
        self._checkpointer = checkpointer
        self._batches = batches
        self._start, self._known = start, known
        self._rows: deque[dict[str, Any]] = deque(maxlen=4)  # no run is further on when it halts
        self._num_pins = 0
        self._failures = failures

    def look(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take note of the next steps, by their rows of metrics.jsonl."""
        for row in rows:
            if row["skipped"] and not math.isfinite(row["grad_norm"]):  # a spike may be left out as well
                is_first = not self._rows or self._rows[-1]["step"] != row["step"] - 1
                self._rows.append(row)
                if is_first and self._known["policy"] == "skip":
                    self.keep(row["step"], MOST_PINS)

    def keep(self, step: int, most_pins: int = sys.maxsize) -> None:
        """Pin the newest checkpoint before a bad step, and write its bundle; nobody waits for that."""
        row = next(row for row in self._rows if row["step"] == step)
        self._checkpointer.look_back(step, partial(self._write, row, most_pins))

    def keep_spike(self, row: Mapping[str, Any], limits: dict[str, float]) -> None:
        """Write the bundle of a spike's first step, with the limit of each quantity that spikes.

        The watch pins the checkpoint while the spike lasts. A non-finite step has its own bundle.
        """
        if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
            write = partial(self._write, {**row, "spike": limits}, 0)
            self._checkpointer.look_back(row["step"], write)

    def _write(self, row: dict[str, Any], most_pins: int, found: Path | None) -> None:
        """On the checkpoint thread: nothing is deleted meanwhile."""
        path = self._attempt.folder / BAD_STEPS / f"step-{row['step']}.json"
        if found is not None and self._num_pins < most_pins:
            with self._failures.noted(found / PIN):
                (found / PIN).write_text(f"{path}\n", encoding="utf-8")
                self._num_pins += 1
        folder, start, batches = self._attempt.run, self._start, self._batches
        place = os.path.relpath(found, folder) if found else start.path and str(start.path.absolute())
        is_pinned, is_start = found is not None and (found / PIN).exists(), found in (None, start.path)
        if is_pinned and "spike" in row and found is not None:
            # An empty pin may be the spike's own, which goes when the spike is over soon.
            is_pinned = bool((found / PIN).read_bytes())
        kind = start.kind if is_start else "resume"
        checkpoint = {"kind": kind, "path": place, "is_start": is_start, "is_pinned": is_pinned}
        positions, end = batches.steps.next_from(row["position"]), batches.order.end
        positions = positions if end is None else positions[positions < end]
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        about = {
            "global_batch_size": batches.steps.sizes[-1][1],
            "config": f"attempts/{self._attempt.number}/config.toml",
            "samples": [numbers[[0, -1]].tolist() for numbers in stretches],
            "checkpoint": checkpoint,
        }
        with self._failures.noted(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, encode({**row, **self._known, **about}))
            level = logging.WARNING if "spike" in row else logging.ERROR
            logger.log(level, f"Replay step {row['step']}: titan run replay {path}")
        event = "spike_bundle" if "spike" in row else "bad_step"
        self._attempt.event(event, step=row["step"], bundle=str(path), checkpoint=checkpoint)
