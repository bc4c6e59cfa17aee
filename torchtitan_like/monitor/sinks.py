"""Show the rows of log steps and validations: on the console, in TensorBoard, in Weights & Biases.

metrics.jsonl and validation.jsonl hold the full rows. The sinks show parts of them under the names
of TorchTitan. Their packages are imported on first use.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_like.monitor.log import logger, paint, use_colors
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.units import format_duration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from torchtitan_like.config.sections_run import Metrics as MetricsSection
    from torchtitan_like.monitor.memory import MemoryReading
    from torchtitan_like.monitor.rows import Row
    from torchtitan_like.monitor.throughput import Progress

# Names of the scalars on dashboards, by key of the row.
STEP_SCALARS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "mtp_loss": "loss_metrics/global_avg_mtp_loss",
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
VALIDATION_SCALARS = {"loss": "loss", "bits_per_byte": "bits_per_byte", "tps": "throughput(tps)"}


class Sink(Protocol):
    """Shows rows. A row is not lost if the process is killed after the call returns."""

    def show_step(self, row: Row, memory: MemoryReading, progress: Progress) -> None: ...

    def show_validation(self, row: Row, memory: MemoryReading) -> None: ...

    def close(self) -> None: ...


def build_sinks(
    section: MetricsSection,
    folder: Path,
    rank: int,
    failures: WriteFailures,
    run_config: Mapping[str, object],
) -> list[Sink]:
    """Build the sinks of a rank: the console, and dashboards on rank 0 or on all ranks.

    folder: the run directory. run_config: the configuration that W&B shows.
    """
    sinks: list[Sink] = []
    if rank == 0 or section.save_for_all_ranks:
        dashboards = folder / section.save_tb_folder
        if section.enable_tensorboard:
            with failures.recording(dashboards):
                sinks.append(TensorBoard(dashboards, rank, failures=failures))
        if section.enable_wandb:
            with failures.recording(dashboards):
                sinks.append(WeightsAndBiases(dashboards, run_config))
    return [*sinks, Console(use_colors(section.disable_color_printing))]


# ---- console


class Console:
    """Writes TorchTitan's log lines, and shorter ones on a terminal: at most 100 columns.

    colors: of the lines on a terminal.
    """

    def __init__(self, colors: bool) -> None:
        self._colors = colors

    def show_step(self, row: Row, memory: MemoryReading, progress: Progress) -> None:
        mfu, tps = row.get("mfu"), _format(row.get("tps"), ",.0f")
        parts = (
            f"step: {row['step']:2}",
            f"loss: {_format(row['loss'], '7.4f')}",
            f"grad_norm: {row['grad_norm']:7.4f}",
            f"memory: {memory.gib:5.2f}GiB({memory.percent:.2f}%)",
            f"tps: {tps}",
            f"tflops: {_format(row.get('tflops'), ',.2f')}",
            f"mfu: {_format(mfu, '.2f')}{'%' if mfu is not None else ''}",
            f"{progress.percent:.1f}% eta {progress.eta}",
        )
        line = "  ".join(parts)
        if "group_lr" in row:
            group_lr = (f"{name} {lr:.3g}" for name, lr in row["group_lr"].items())
            line += f"  lr: {row['lr']:.3g} {' '.join(group_lr)}"
        short = [
            ("red", f"step {row['step']}"),
            ("green", f"loss {_format(row['loss'], '.4f')}"),
            ("yellow", f"grad_norm {row['grad_norm']:.3g}"),
            ("cyan", f"{memory.gib:.1f} GiB"),
            ("blue", f"{tps} tps"),
            *([] if mfu is None else [("magenta", f"mfu {mfu:.0f}%")]),
            ("cyan", f"eta {format_duration(progress.eta.total_seconds())}"),
        ]
        painted = (paint(text, color, self._colors) for color, text in short)
        logger.info(line, extra=on_screen("  ".join(painted)))

    def show_validation(self, row: Row, memory: MemoryReading) -> None:
        dataset = f"{row['set']} " if "set" in row else ""
        line = f"validate {dataset}step: {row['step']:2}  loss: {row['loss']:7.4f}"
        if "bits_per_byte" in row:
            line += f"  bits/byte: {row['bits_per_byte']:6.4f}"
        line += f"  memory: {memory.gib:5.2f}GiB({memory.percent:.2f}%)"
        short = f"validate {dataset}step {row['step']}  loss {row['loss']:.4f}"
        tps = _format(row.get("tps"), ",.0f")
        logger.info(f"{line}  tps: {tps}", extra=on_screen(short))

    def close(self) -> None:
        """Do nothing: the log stays open."""


def _format(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


# ---- dashboards


class Dashboard(ABC):
    """A sink that draws one curve per scalar."""

    def show_step(self, row: Row, memory: MemoryReading, progress: Progress) -> None:
        self.write(row["step"], step_scalars(row) | memory.scalars)

    def show_validation(self, row: Row, memory: MemoryReading) -> None:
        self.write(row["step"], validation_scalars(row, memory))

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step."""

    @abstractmethod
    def close(self) -> None: ...


def step_scalars(row: Row) -> dict[str, float]:
    """Return the scalars of a log step, by TorchTitan's names. Sources without labels have none."""
    scalars = {
        name: float(row[key]) for key, name in STEP_SCALARS.items() if row.get(key) is not None
    }
    for group, lr in row.get("group_lr", {}).items():
        scalars[f"lr/{group}"] = lr
    for source, values in row.get("sources", {}).items():
        if values["loss"] is not None:
            scalars[f"loss_metrics/{source}/avg_loss"] = float(values["loss"])
    for key, value in row.get("moe", {}).items():
        if not isinstance(value, list):  # lists have an entry for each layer
            scalars[f"moe/{key}"] = float(value)
    return scalars


def validation_scalars(row: Row, memory: MemoryReading) -> dict[str, float]:
    """Return the scalars of a validation, by TorchTitan's names."""
    prefix = f"validation_metrics/{row['set']}/" if "set" in row else "validation_metrics/"
    scalars = {name: float(row[key]) for key, name in VALIDATION_SCALARS.items() if key in row}
    return {f"{prefix}{name}": value for name, value in (scalars | memory.scalars).items()}


class TensorBoard(Dashboard):
    """Event files in `<folder>/<date-time>`, or `<folder>/rank_<r>/<date-time>` on ranks except 0.

    Each attempt has its own folder, so that no curve shows a step twice after a resume. The first
    `write` imports the package, so that the import does not delay the first step.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        wall_clock: Callable[[], float] = time.time,
        failures: WriteFailures | None = None,
    ) -> None:
        started = time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_clock()))
        self.folder = _make_new(folder / started, rank)
        self._failures = WriteFailures() if failures is None else failures
        self._writer: SummaryWriter | None = None
        _silence_writer_threads()
        logger.info(f"TensorBoard logging enabled. Logs will be saved at {self.folder}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write all scalars; they are in the file when this returns.

        After a failed write, a new event file in the same folder continues the curves.
        """
        from torch.utils.tensorboard import SummaryWriter

        with self._failures.recording(self.folder):
            try:
                if self._writer is None:
                    self._writer = SummaryWriter(str(self.folder))
                for tag, value in scalars.items():
                    self._writer.add_scalar(tag, value, step)
                self._writer.flush()
            except OSError:
                self._writer = None  # its thread has ended
                raise

    def close(self) -> None:
        if self._writer is not None:
            with self._failures.recording(self.folder):
                self._writer.close()


def _silence_writer_threads() -> None:
    """Print no traceback of an OSError in TensorBoard's threads: `TensorBoard.write` reports it."""
    former = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        is_of_tensorboard = type(error.thread).__module__.startswith("tensorboard.")
        if not (is_of_tensorboard and issubclass(error.exc_type, OSError)):
            former(error)

    threading.excepthook = hook


def _make_new(folder: Path, rank: int) -> Path:
    """Make `folder`, or the first of `folder-2`, `folder-3` ... that does not exist."""
    if rank > 0:
        # Next to the folders of rank 0, not inside one: ranks get here in any order.
        folder = folder.parent / f"rank_{rank}" / folder.name
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1


class WeightsAndBiases(Dashboard):
    """A W&B run.

    Project, entity and name are WANDB_PROJECT, WANDB_ENTITY (or WANDB_TEAM) and WANDB_RUN_NAME.
    """

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
        """Send the scalars to wandb's own process."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
