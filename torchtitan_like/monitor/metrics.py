"""The numbers of each step: kept on the device until a log step, then written once, the same on every layout.

metrics.jsonl is the truth (docs/reference/metrics.md lists its keys). The console, TensorBoard
and W&B show parts of it under TorchTitan's names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.monitor import flops
from torchtitan_like.monitor.log import logger, paint, use_colors
from torchtitan_like.monitor.memory import MemoryMonitor, MemoryReading
from torchtitan_like.monitor.sinks import Sink, TensorBoard, WeightsAndBiases
from torchtitan_like.util import run_directory
from torchtitan_like.util.files import StorageError, WriteFailures
from torchtitan_like.util.jsonl import JsonlFile

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Metrics as MetricsSection

Row = dict[str, Any]
REPLAY_KEYS = ("position", "rank_losses")
# Takes this rank's (num_steps, columns) float64 CPU tensor, returns all data ranks': (data_ranks, num_steps, columns).
Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepRecord:
    """One training step as a rank knows it. The 0-dim tensors stay on the device and must not be changed afterwards.

    num_tokens, num_valid_tokens: tokens fed in this step over all ranks, and those of them with a label.
    local_valid_tokens: labels of this data rank. loss_share: the sum of its token losses / num_valid_tokens.
    local_valid_by_source, loss_by_source: its labels, and the sums of its token losses (sources,), of each source; empty
    where sources are not told apart.
    grad_norm, skipped: of the whole model, equal on all ranks; skipped is 1 when the update was left out.
    position: where the stream of samples was before this step.
    data_digest, data_digest_chain: of the tokens fed, unsigned 64 bit. data_loading_s: seconds waited for the batch.
    """

    step: int
    num_tokens: int
    num_valid_tokens: int
    local_valid_tokens: int
    loss_share: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    lr: float
    data_digest: int
    data_digest_chain: int
    data_loading_s: float
    position: int = 0
    local_valid_by_source: Sequence[int] = ()
    loss_by_source: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class _Interval:
    """What has happened since the last log line. ``started`` is a reading of the active clock."""

    started: float
    num_steps: int = 0
    num_tokens: int = 0
    data_loading_s: float = 0.0


def announce_hardware(
    memory: MemoryMonitor, device_type: str, override: float | None, flops_per_token: float
) -> float | None:
    """Log what the device is and how MFU is computed; its peak in FLOP/s, None when unknown."""
    logger.info(f"{memory.describe()}; memory usage for model: {memory.read().gib:.2f}GiB")
    peak = flops.peak_flops(memory.device_name if device_type == "cuda" else "cpu", override)
    shown = f"{peak:.3e} FLOP/s" if peak else "n/a"
    logger.info(
        f"Peak FLOPS used for computing MFU: {shown}; {flops_per_token / 1e9:.3f} GFLOP per token = "
        "6 (P - P_embedding) + 6 L H (2 head_dim) seq"
    )
    return peak


class Metrics:
    """Collects step records and writes them at log steps; the only host synchronisation is there.

    All ranks call ``record``, ``log`` and ``flush`` alike (``gather`` is a collective); only ``writer`` (rank 0) writes
    files; with ``metrics.save_for_all_ranks`` every rank has TensorBoard files or W&B runs of its own, told apart by
    ``rank``. ``flops_per_token`` counts forward and backward; ``num_passes`` is 3, or 4 with full recomputation (for
    HFU). ``peak_flops`` is that of one device, None when unknown. ``total_steps`` is the last step of the run.
    ``sources``: the names of those that the records tell apart.
    """

    def __init__(
        self,
        section: MetricsSection,
        *,
        folder: Path,
        attempt: int,
        writer: bool,
        gather: Gather,
        flops_per_token: float,
        peak_flops: float | None,
        world_size: int,
        memory_monitor: MemoryMonitor,
        total_steps: int,
        sources: Sequence[str] = (),
        rank: int = 0,
        num_passes: float = 3.0,
        run_config: Mapping[str, object] | None = None,
        failures: WriteFailures | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.n_tokens_seen = 0
        self.observers: list[Callable[[list[Row]], None]] = []  # of the rows that have been written
        self.step_seconds = 0.0  # of a step, as measured for the last log line
        self._section = section
        self._folder, self._attempt, self._writer = folder, attempt, writer
        self._gather = gather
        self._flops_per_token, self._peak_flops, self._num_passes = flops_per_token, peak_flops, num_passes
        self._world_size, self._total_steps, self._sources = world_size, total_steps, sources
        self._memory = memory_monitor
        self._clock, self._wall_clock = clock, wall_clock
        self._colors = use_colors(section.disable_color_printing)
        self._failures = WriteFailures() if failures is None else failures
        self._steps_file = JsonlFile(folder / run_directory.METRICS, self._failures)
        self._validation_file = JsonlFile(folder / run_directory.VALIDATION, self._failures)
        self._sinks = self._build_sinks(rank, run_config or {})
        self._pending: list[tuple[StepRecord, int, float]] = []
        self._last_row: Row = {}
        self._paused_s = 0.0
        self._interval = _Interval(self._active_clock())
        self._num_recorded = 0
        self._first_recorded_at = (0.0, 0.0)  # clock, active clock
        self._warned_of_mfu = False
        self._data_is_late = False

    # ---- during the run

    def record(self, record: StepRecord) -> None:
        """Keep the step's values; nothing waits for the device."""
        self._num_recorded += 1
        if self._num_recorded == 1:
            self._first_recorded_at = (self._clock(), self._active_clock())
        elif self._num_recorded == 2 and self._interval.num_steps == 1:
            # A process's first step compiles and warms up: it counts only in a log line of its own.
            self._interval = _Interval(self._first_recorded_at[1])
        self.n_tokens_seen += record.num_tokens
        self._interval.num_steps += 1
        self._interval.num_tokens += record.num_tokens
        self._interval.data_loading_s += record.data_loading_s
        record = replace(record, loss_share=record.loss_share.detach())  # else the graph lives until the log step
        self._pending.append((record, self.n_tokens_seen, self._wall_clock()))

    def due(self, step: int) -> bool:
        """Whether ``step`` is a log step: the run's first, every ``metrics.log_freq``-th, its last."""
        return step == 1 or step % self._section.log_freq == 0 or step == self._total_steps

    def log(self, step: int) -> Row:
        """Write the rows of all steps since the last call, a log line and the scalars; returns the row of ``step``."""
        rows = self._collect()
        row = rows[-1] if rows else self._last_row
        assert row.get("step") == step, f"step {step} was not recorded"
        memory, ended = self._memory.read(), self._active_clock()
        row.update(self._measure(memory, ended))
        self.step_seconds = row.get("step_s", self.step_seconds)
        self._write(rows)
        scalars = self._scalars(row, memory)
        for sink in self._sinks:
            sink.write(step, scalars)
        logger.info(self._line(row, memory))
        self._watch(row)
        self._memory.reset()
        # What has been written here takes time as well. The first line imports what it needs: that is warming up.
        self._interval = _Interval(ended if self._num_recorded > 1 else self._active_clock())
        return row

    def flush(self, step: int) -> None:
        """Write the rows up to ``step`` without a log line: before a checkpoint is published, and before each stop."""
        rows = self._collect()
        assert not rows or rows[-1]["step"] == step, f"rows end at {rows[-1]['step']}, not at {step}"
        self._write(rows)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here (checkpoints, validation) is not training: throughput leaves it out.

        Enter it with the device idle (after ``log`` or ``flush``), or the end of the last step is left out as well.
        """
        started = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - started

    def validation(
        self, step: int, loss: float, bits_per_byte: float | None, num_tokens: int, seconds: float, name: str = ""
    ) -> Row:
        """Write one validation result. ``loss``: nats per token over all ``num_tokens`` labels of all ranks. ``name``: of the
        text, where there are several.
        """
        tps = num_tokens / (seconds * self._world_size) if seconds > 0 else None
        memory = self._memory.read()
        known = {"bits_per_byte": bits_per_byte, "tps": tps}
        row: Row = {
            "step": step,
            **({"set": name} if name else {}),
            "n_tokens_seen": self.n_tokens_seen,
            "loss": loss,
            "num_tokens": num_tokens,
            "seconds": seconds,
            "memory_gib": memory.gib,
            "time": self._wall_clock(),
            **{key: value for key, value in known.items() if value is not None},
        }
        if self._writer:
            self._validation_file.append([row])
        names = {"loss": "loss", "bits_per_byte": "bits_per_byte", "tps": "throughput(tps)"}
        prefix = f"validation_metrics/{name}/" if name else "validation_metrics/"
        scalars = {f"{prefix}{scalar}": float(row[key]) for key, scalar in names.items() if key in row}
        scalars |= {f"{prefix}{scalar}": value for scalar, value in memory.scalars.items()}
        for sink in self._sinks:
            sink.write(step, scalars)
        logger.info(
            f"validate {name}{' ' * bool(name)}step: {step:2}  loss: {loss:7.4f}"
            + (f"  bits/byte: {bits_per_byte:6.4f}" if bits_per_byte is not None else "")
            + f"  memory: {memory.gib:5.2f}GiB({memory.percent:.2f}%)  tps: {_number(tps, ',.0f')}"
        )
        self._memory.reset()
        return row

    # ---- start, checkpoints, end

    def rewind(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Call at every start with the step that was loaded (0: none): later rows leave metrics.jsonl and
        validation.jsonl for ``*.discarded-<attempt>.jsonl``, so that no step stands twice.

        ``saved``: what the checkpoint tells of its step and of metrics.jsonl as it was then, where both are of one folder. If
        that is not the file any more (another run wrote it, or it was deleted or changed), a warning says so.
        """
        if not self._writer:
            return
        for file in (self._steps_file, self._validation_file):
            discarded = self._folder / f"{file.path.stem}.discarded-{self._attempt}.jsonl"
            num_moved = file.rewind(step, discarded)
            if num_moved:
                logger.info(f"Moved {num_moved} rows beyond step {step} from {file.path.name} to {discarded.name}")
        if not (saved and saved.get("metrics_bytes") and "digest_chain" in saved):
            return
        size, row = self._steps_file.end()
        wrote = saved["metrics_bytes"], step, f"{saved['digest_chain']:016x}"
        if (found := (size, row.get("step"), row.get("data_digest_chain"))) != wrote:
            told = "{} bytes, the last row of step {} with data_digest_chain {}".format
            logger.warning(
                f"{self._steps_file.path} is not what this run wrote: it had {told(*wrote)} when the checkpoint of that step "
                f"was saved, and has {told(*found)}. The rows of this run follow what is there; what is missing may "
                "be in metrics.discarded-*.jsonl"
            )

    def byte_offset(self, step: int) -> int:
        """Size of metrics.jsonl in bytes after fsync; a checkpoint of ``step`` stores it. 0 on ranks that do not write, and
        where rows beyond ``step`` are in it.
        """
        size = self._steps_file.byte_offset() if self._writer else 0
        return size if self._last_row.get("step", step) == step else 0

    def check_written(self) -> None:
        """Raise StorageError if rows of past steps are not on the disk. For the rank that writes."""
        try:
            self._validation_file.require_all()
            self._steps_file.sync()
        except OSError as error:
            raise StorageError(
                f"The rows of past steps cannot be written: {error}. A checkpoint is published only after them, so none is "
                "saved now. Free space or repair the disk, then start the run again: it repeats the steps since the last "
                "checkpoint"
            ) from error

    def close(self) -> None:
        """Close files and sinks. No collective: it may be called after a fault, when ``flush`` must not."""
        self._steps_file.close()
        self._validation_file.close()
        for sink in self._sinks:
            sink.close()

    # ---- parts

    def _build_sinks(self, rank: int, run_config: Mapping[str, object]) -> list[Sink]:
        section = self._section
        sinks: list[Sink] = []
        if not (self._writer or section.save_for_all_ranks):
            return sinks
        folder = self._folder / section.save_tb_folder
        if section.enable_tensorboard:
            with self._failures.noted(folder):
                sinks.append(TensorBoard(folder, rank, self._wall_clock, self._failures))
        if section.enable_wandb:
            with self._failures.noted(folder):
                sinks.append(WeightsAndBiases(folder, run_config))
        return sinks

    def _active_clock(self) -> float:
        """Seconds outside ``pause``."""
        return self._clock() - self._paused_s

    def _collect(self) -> list[Row]:
        """The rows of all pending steps: one copy from the device, one gather."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        records = [record for record, _, _ in pending]
        columns = [[r.loss_share for r in records], [r.grad_norm for r in records], [r.skipped for r in records]]
        columns += [list(losses) for losses in zip(*(r.loss_by_source for r in records), strict=True)]
        device = records[0].loss_share.device  # the norm may be elsewhere, where parameters are offloaded
        stacked = torch.stack([torch.stack(column).to(device, torch.float64) for column in columns])
        shares, norms, skipped, *by_source = stacked.cpu().tolist()
        num_by_source = zip(*(r.local_valid_by_source for r in records), strict=True)
        means = [_local_mean(record, share) for record, share in zip(records, shares, strict=True)]
        # Exact copies are gathered and added on the host: an all-reduce would round differently with another number of
        # steps in the buffer, and log_freq would show in the last bits of the loss.
        local = torch.tensor([shares, means, *by_source, *num_by_source], dtype=torch.float64).T.contiguous()
        gathered: list[list[list[float]]] = self._gather(local).tolist()
        rows = []
        for i, (record, n_tokens_seen, wall_time) in enumerate(pending):
            rows.append({
                "step": record.step,
                "n_tokens_seen": n_tokens_seen,
                "num_valid_tokens": record.num_valid_tokens,
                "loss": _exact_sum([rank[i][0] for rank in gathered]),
                "max_loss": _max([rank[i][1] for rank in gathered]),
                "grad_norm": norms[i],
                "lr": record.lr,
                "data_digest": f"{record.data_digest:016x}",
                "data_digest_chain": f"{record.data_digest_chain:016x}",
                "skipped": int(skipped[i]),
                **self._by_source([rank[i][2:] for rank in gathered]),
                "time": wall_time,
                "data_loading_s": record.data_loading_s,
            })  # fmt: skip
            if skipped[i] or self._writer:  # where observers may leave a replay bundle
                known = {str(rank): None if row[i][1] == -math.inf else row[i][1] for rank, row in enumerate(gathered)}
                rows[-1] |= {"position": record.position, "rank_losses": known}
        self._last_row = rows[-1]
        return rows

    def _by_source(self, ranks: list[list[float]]) -> Row:
        """Mean loss and labels of each source; ranks: of each data rank the sums of losses, then the numbers of labels."""
        sums = [_exact_sum(list(values)) for values in zip(*ranks, strict=True)]
        half = len(self._sources)
        found = {
            name: {"loss": total / num if num else None, "num_valid_tokens": int(num)}
            for name, total, num in zip(self._sources, sums[:half], sums[half:], strict=True)
        }
        return {"sources": found} if found else {}

    def _measure(self, memory: MemoryReading, ended: float) -> Row:
        """Means over the interval that has `ended`; ``tps`` and what follows from it are per device."""
        interval = self._interval
        measured: Row = {"memory_gib": memory.gib}
        seconds = ended - interval.started
        if interval.num_steps == 0 or seconds <= 0:
            return measured
        # NOTE: equals TorchTitan's (tokens of one data rank) / (seconds * cp * tp * pp), as num_tokens is global.
        tps = interval.num_tokens / (seconds * self._world_size)
        measured["tps"] = tps
        measured["tflops"] = self._flops_per_token * tps / 1e12
        if self._peak_flops is not None:
            measured["mfu"] = flops.mfu(self._flops_per_token, tps, self._peak_flops)
            measured["hfu"] = flops.hfu(self._flops_per_token, tps, self._peak_flops, self._num_passes)
        measured["step_s"] = seconds / interval.num_steps
        measured["mean_data_loading_s"] = interval.data_loading_s / interval.num_steps
        measured["data_loading_percent"] = 100.0 * interval.data_loading_s / seconds
        return measured

    def _write(self, rows: list[Row]) -> None:
        if self._writer and rows:
            self._steps_file.append([_stored(row) for row in rows])
        for observe in self.observers:
            observe(rows)

    def _scalars(self, row: Row, memory: MemoryReading) -> dict[str, float]:
        names = {
            "loss": "loss_metrics/global_avg_loss",
            "max_loss": "loss_metrics/global_max_loss",
            "grad_norm": "grad_norm",
            "tps": "throughput(tps)",
            "tflops": "tflops",
            "mfu": "mfu(%)",
            "hfu": "hfu(%)",
            "step_s": "time_metrics/end_to_end(s)",
            "mean_data_loading_s": "time_metrics/data_loading(s)",
            "data_loading_percent": "time_metrics/data_loading(%)",
            "n_tokens_seen": "n_tokens_seen",
            "lr": "lr",
        }
        of_sources = {
            f"loss_metrics/{name}/avg_loss": float(found["loss"])
            for name, found in row.get("sources", {}).items()
            if found["loss"] is not None
        }
        return {name: float(row[key]) for key, name in names.items() if key in row} | of_sources | memory.scalars

    def _line(self, row: Row, memory: MemoryReading) -> str:
        mfu = row.get("mfu")
        parts = (
            ("red", f"step: {row['step']:2}"),
            ("green", f"loss: {row['loss']:7.4f}"),
            ("yellow", f"grad_norm: {row['grad_norm']:7.4f}"),
            ("cyan", f"memory: {memory.gib:5.2f}GiB({memory.percent:.2f}%)"),
            ("blue", f"tps: {_number(row.get('tps'), ',.0f')}"),
            ("cyan", f"tflops: {_number(row.get('tflops'), ',.2f')}"),
            ("magenta", f"mfu: {_number(mfu, '.2f')}{'%' if mfu is not None else ''}"),
        )
        return "  ".join(paint(text, color, self._colors) for color, text in parts) + self._progress(row["step"])

    def _progress(self, step: int) -> str:
        """Percent of the run and the time to its end, as far as a timedelta can tell it: pauses count here, the process's
        first step does not.
        """
        num_steps = self._num_recorded - 1
        since = self._first_recorded_at[0]
        if num_steps == 0:  # nothing else to go by
            num_steps, since = 1, self._interval.started
        left = max(0, self._total_steps - step) * (self._clock() - since) / num_steps
        return f"  {100.0 * step / self._total_steps:.1f}% eta {timedelta(seconds=round(min(left, 1e13)))}"

    def _watch(self, row: Row) -> None:
        """Warn when data comes late, at each change to the worse, and once when MFU is past belief."""
        alarm = self._section.data_loading_alarm
        percent = row.get("data_loading_percent", 0.0)
        is_late = self._num_recorded > 1 and percent > 100.0 * alarm
        if is_late and not self._data_is_late:
            logger.warning(
                f"Waiting for data took {percent:.0f}% of the time since the last log line: "
                f"{row['mean_data_loading_s']:.4f} s of {row['step_s']:.4f} s a step. "
                "The next batch must take no longer to make than a step: put the token cache (data.cache_folder) "
                f"on a faster disk. metrics.data_loading_alarm = {alarm} sets the share that is tolerated."
            )
        self._data_is_late = is_late
        if row.get("mfu", 0.0) > 100.0 and not self._warned_of_mfu:
            self._warned_of_mfu = True
            logger.warning(
                f"MFU is {row['mfu']:.1f}%, which cannot be: {self._peak_flops:.4g} FLOP/s is not this device's peak "
                "(metrics.peak_flops), or FLOPs per token are counted wrongly"
            )


def _local_mean(record: StepRecord, share: float) -> float:
    """Mean loss of this data rank's own labels; -inf, which no maximum takes, when it had none."""
    return share * record.num_valid_tokens / record.local_valid_tokens if record.local_valid_tokens else -math.inf


def _exact_sum(values: list[float]) -> float:
    """The sum rounded once, whatever the order; where terms are not finite, what floating point makes of them."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # an overflow, or inf - inf
        return math.nan if any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values) else math.inf


def _max(values: list[float]) -> float:
    """The largest of the ranks' means: nan if one is nan, 0 if no rank had a label."""
    if any(map(math.isnan, values)):
        return math.nan
    largest = max(values)
    return 0.0 if largest == -math.inf else largest


def _number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def _stored(row: Row) -> Row:
    """A row as metrics.jsonl has it: only skipped steps keep what replay bundles need."""
    return row if row["skipped"] else {k: v for k, v in row.items() if k not in REPLAY_KEYS}
