"""Record the numbers of each step, and show them at log steps.

| part | does |
| --- | --- |
| `rows.RowCollector` | turns the values of steps into rows, with one copy and one gather |
| `experts.ExpertMetrics` | computes how evenly experts are loaded |
| `reference_curve.ReferenceCurve` | has the bits per byte that a recipe's runs reached |
| `throughput.ThroughputClock` | measures the steps between log lines |
| `rows.RowFiles` | writes metrics.jsonl and validation.jsonl on rank 0 |
| `extensions.user_code.Observers` | passes rows on to user code |
| `sinks.Sink` | shows rows: console, TensorBoard, W&B |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_like.monitor.experts import ExpertMetrics
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.memory import MemoryMonitor
from torchtitan_like.monitor.rows import Row, RowCollector, RowFiles, StepRecord
from torchtitan_like.monitor.sinks import Sink
from torchtitan_like.monitor.throughput import ThroughputClock

if TYPE_CHECKING:
    from torchtitan_like.extensions.user_code import Observers
    from torchtitan_like.monitor.reference_curve import ReferenceCurve


class Metrics:
    """The numbers of a run. Its parts are built by `build.build_metrics`.

    All ranks call `record`, `log` and `flush` for the same steps, because rows need a gather.

    user_observers: empty on all ranks but 0. files: None on ranks that write no files.
    reference: None on all ranks but 0, and in runs that are compared with no curve.
    log_freq: steps between log lines. last_step: of the run. wall_clock: returns seconds since
    1970.
    """

    def __init__(
        self,
        rows: RowCollector,
        throughput: ThroughputClock,
        memory: MemoryMonitor,
        sinks: Sequence[Sink],
        files: RowFiles | None,
        user_observers: Observers,
        experts: ExpertMetrics,
        reference: ReferenceCurve | None = None,
        *,
        log_freq: int,
        last_step: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.n_tokens_seen = 0
        self.observers: list[Callable[[list[Row]], None]] = []  # called with rows that are written
        self.rows = rows
        self.throughput = throughput
        self.memory = memory
        self.sinks = sinks
        self.experts = experts
        self._reference = reference
        self._files = files
        self._user_observers = user_observers
        self._log_freq = log_freq
        self._last_step = last_step
        self._wall_clock = wall_clock

    # ---- steps

    def record(self, record: StepRecord) -> None:
        """Keep the values of a step. Does not wait for the device."""
        self.throughput.record(record.num_tokens, record.data_loading_s)
        self.n_tokens_seen += record.num_tokens + record.num_other_tokens
        self.rows.add(record, self.n_tokens_seen, self._wall_clock())

    def forget_after(self, step: int) -> None:
        """Forget the steps after `step`, which run again. They have not been logged."""
        for record in self.rows.forget_after(step):
            self.throughput.forget(record.num_tokens, record.data_loading_s)
            self.n_tokens_seen -= record.num_tokens + record.num_other_tokens

    def due(self, step: int) -> bool:
        """Return True for the first step of the run, every `log_freq`-th, and the last."""
        return step == 1 or step % self._log_freq == 0 or step == self._last_step

    def log(self, step: int, loads: Mapping[str, Any] | None = None) -> Row:
        """Write the rows of all steps since the last call; show and return the row of `step`.

        loads: the arguments of `ExpertMetrics.row`; none for a dense model.
        """
        rows = self.rows.collect()
        row = self.rows.last_row
        assert row.get("step") == step, f"step {step} was not recorded"
        memory = self.memory.read()
        measured = self.throughput.measure()
        row.update({"memory_gib": memory.gib, **measured})
        if loads:
            row["moe"] = self.experts.row(**loads)
        self._write(rows)
        progress = self.throughput.progress(step, self._last_step)
        for sink in self.sinks:
            sink.show_step(row, memory, progress)
        self.throughput.warn(measured)
        self.memory.reset()
        self.throughput.start_interval()
        return row

    def flush(self, step: int) -> None:
        """Write the rows up to `step` without showing one.

        Called before a checkpoint is published and before the run stops.
        """
        rows = self.rows.collect()
        assert not rows or rows[-1]["step"] == step, f"rows end at {rows[-1]['step']}, not {step}"
        self._write(rows)

    def _write(self, rows: list[Row]) -> None:
        if self._files is not None and rows:
            self._files.append_steps(rows)
        for observe in self.observers:
            observe(rows)
        self._user_observers.on_steps(rows)

    # ---- validation

    def validation(
        self,
        step: int,
        loss: float,
        bits_per_byte: float | None,
        num_tokens: int,
        seconds: float,
        dataset: str = "",
    ) -> Row:
        """Write and show the result of a validation; return its row.

        loss: nats per token over the `num_tokens` labels of all ranks. bits_per_byte: None if the
        bytes of a token are unknown. dataset: its name, if there are several.
        """
        memory = self.memory.read()
        tps = self.throughput.tokens_per_second(num_tokens, seconds)
        curve, compared = self._reference, None
        if curve is not None and dataset == curve.dataset and bits_per_byte is not None:
            compared = curve.compare(step, self.n_tokens_seen, bits_per_byte)
        row: Row = {
            "step": step,
            **({"set": dataset} if dataset else {}),
            "n_tokens_seen": self.n_tokens_seen,
            "loss": loss,
            "num_tokens": num_tokens,
            "seconds": seconds,
            "memory_gib": memory.gib,
            "time": self._wall_clock(),
            **({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte}),
            **({} if compared is None else {"reference_bits_per_byte": compared.reference}),
            **({} if tps is None else {"tps": tps}),
        }
        if self._files is not None:
            self._files.append_validation(row)
        for sink in self.sinks:
            sink.show_validation(row, memory)
        if compared is not None:
            logger.info(compared.line)
        self._user_observers.on_validation(row)
        self.memory.reset()
        return row

    # ---- start, checkpoints, end

    def rewind(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Move the rows beyond the loaded step (0: none) out of the files.

        saved: see `RowFiles.rewind`. Raises StorageError.
        """
        if self._files is not None:
            self._files.rewind(step, saved)

    def byte_offset(self, step: int) -> int:
        """Return the size of metrics.jsonl once it is on disk; a checkpoint of `step` stores it.

        0 on ranks that write no files, and if the file has rows beyond `step`.
        """
        size = 0 if self._files is None else self._files.sync()
        return size if self.rows.last_row.get("step", step) == step else 0

    def check_written(self) -> None:
        """Raise StorageError if rows of past steps are not on disk."""
        if self._files is not None:
            self._files.check_written()

    def close(self) -> None:
        """Close files and sinks. Not a collective, so it may follow a crash; `flush` must not."""
        if self._files is not None:
            self._files.close()
        for sink in self.sinks:
            sink.close()
        self._user_observers.close()
