"""Where scalars go beside metrics.jsonl: TensorBoard and, if asked for, Weights & Biases. Imported only when used."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchtitan_like.monitor.log import logger
from torchtitan_like.util.files import AppendOnlyFile, WriteFailures


class Sink(Protocol):
    """Takes the scalars of one step; all it got is on its way when ``write`` returns."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under ``<folder>/<date-time>``. Each attempt gets a folder of its own: a curve is never drawn twice
    over steps that were rolled back. ``rank`` not 0 (``metrics.save_for_all_ranks``) writes below ``rank_<rank>``.

    The package is imported at the first ``write``, which keeps it out of the time to the first step.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        wall_clock: Callable[[], float] = time.time,
        failures: WriteFailures | None = None,
    ) -> None:
        self.folder = _make_new(folder / time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_clock())), rank)
        self._wall_clock = wall_clock
        self._failures = WriteFailures() if failures is None else failures
        self._file: AppendOnlyFile | None = None
        logger.info(f"TensorBoard logging enabled. Logs will be saved at {self.folder}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One record that holds all scalars, in the file when this returns.

        Written here and now: handing it to tensorboard's writer thread and waiting for it takes five times as long.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        record = self._record(step=step, summary=Summary(value=values))
        if self._file is None:
            now = self._wall_clock()
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
            self._file = AppendOnlyFile(self.folder / name)
            record = self._record(file_version="brain.Event:2") + record
        with self._failures.noted(self._file.path):
            self._file.append(record)

    def close(self) -> None:
        if self._file is not None:
            with self._failures.noted(self._file.path):
                self._file.close()

    def _record(self, **fields: Any) -> bytes:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(Event(wall_time=self._wall_clock(), **fields).SerializeToString())
        return buffer.getvalue()


def _make_new(folder: Path, rank: int) -> Path:
    """Make ``folder``, or the first of ``folder-2``, ``folder-3`` ... that nobody has."""
    if rank > 0:
        # Beside rank 0's folders, not in one: ranks reach this line in any order, and their clocks differ.
        folder = folder.parent / f"rank_{rank}" / folder.name
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1


class WeightsAndBiases:
    """A W&B run. Project, entity and name come from WANDB_PROJECT, WANDB_ENTITY (or WANDB_TEAM) and WANDB_RUN_NAME."""

    def __init__(self, folder: Path, run_config: Mapping[str, object]) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan_like"),
            entity=os.environ.get("WANDB_ENTITY") or os.environ.get("WANDB_TEAM"),
            name=os.environ.get("WANDB_RUN_NAME"),
            dir=str(folder),
            config=dict(run_config),
        )
        logger.info("WandB logging enabled")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
