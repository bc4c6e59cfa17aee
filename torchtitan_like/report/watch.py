"""`titan run watch`: the status of a run, as plain lines or drawn in a terminal with Rich."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.report.disk import checkpoints_left, free_space, newest_checkpoint
from torchtitan_like.report.events import event_line
from torchtitan_like.report.state import (
    RUNNING,
    STOPPED,
    RunState,
    find_state,
    format_ranks,
    median_step_seconds,
    require_run,
)
from torchtitan_like.report.tolerant import Row, newest_events, newest_metrics, read_run_config
from torchtitan_like.util.output import printable
from torchtitan_like.util.run_directory import newest_attempt, read_heartbeats
from torchtitan_like.util.units import GIB, format_clock

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_STEP = "no step has finished yet"
# Key of a metrics row, digits after the decimal point, unit.
SPEEDS = (
    ("tps", 0, "tokens/s on each device"),
    ("tflops", 2, "TFLOP/s"),
    ("mfu", 1, "% MFU"),
    ("memory_gib", 2, "GiB"),
)
BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
SPARKLINE_WIDTH = 60  # characters
MAX_EVENTS = 5
COLORS = {"running": "green", "done": "green", "paused": "yellow", "failed": "red"}  # of tones


@dataclass(frozen=True)
class Status:
    """What `titan run watch` shows of a run at the Unix time `now`.

    rows: the newest ones of metrics.jsonl, oldest first. total_steps: None if unknown.
    problems: files that cannot be read in full.
    """

    run: Path
    now: float
    state: RunState
    rows: list[Row]
    total_steps: int | None
    problems: list[str]

    @classmethod
    def read(cls, run: Path, now: float) -> Status:
        """Read the files of a run. Raises ValueError if `run` is not a run directory."""
        require_run(run)
        rows, problems = newest_metrics(run)
        total = None
        try:
            total = read_run_config(run).get("training", {}).get("steps")
        except ValueError as error:
            problems.append(str(error))
        return cls(run, now, find_state(run, now), rows, total, problems)

    def progress_lines(self) -> list[str]:
        """Return the newest step, its loss, the newest measured speeds, and the remaining time."""
        if not self.rows:
            return [NO_STEP]
        last, step, total = self.rows[-1], self.rows[-1]["step"], self.total_steps
        age = format_clock(max(0.0, self.now - last["time"]))
        of_total = f" of {total:,}" if total else ""
        loss = "none" if last.get("loss") is None else f"{float(last['loss']):.4f}"
        lines = [
            f"step {step:,}{of_total} ({age} ago), {last['n_tokens_seen']:,} tokens",
            f"loss {loss}, grad_norm {float(last['grad_norm']):.4f}, lr {last['lr']:.3g}",
        ]
        logged = next((row for row in reversed(self.rows) if "tps" in row), {})
        speeds = [
            f"{logged[key]:,.{digits}f} {unit}"
            for key, digits, unit in SPEEDS
            if logged.get(key) is not None
        ]
        lines += [", ".join(speeds)] if speeds else []
        seconds = median_step_seconds(self.rows)
        if seconds is not None and total and step < total and self.state.name != STOPPED:
            left = format_clock((total - step) * seconds)
            lines.append(
                f"{seconds:.3g} s per step: {left} left, without checkpoints and validation"
            )
        return lines

    def state_lines(self) -> list[str]:
        """Return why the run hangs or has stopped, and what to do; nothing for a running one."""
        if self.state.name == RUNNING:
            return []
        return [self.state.line, *([self.state.advice] if self.state.advice else [])]

    def disk_line(self) -> str:
        """Return the free space, and how many checkpoints fit. Raises OSError."""
        free = free_space(self.run)
        size = newest_checkpoint(self.run)
        line = f"disk: {free.num_bytes / GIB:,.1f} GiB free"
        if size is not None:
            line += f", room for {checkpoints_left(free, size):,} checkpoints"
        return line

    def rank_lines(self) -> list[str]:
        """Return one line for each position with its ranks, slowest first, and one of silent ranks."""
        attempt = newest_attempt(self.run)
        content = read_heartbeats(attempt) if attempt is not None else {}
        heartbeats = {rank: beat for rank, beat in content.items() if "time" in beat}
        ranks_at: dict[tuple[int, int, str], list[int]] = {}
        for rank, beat in heartbeats.items():
            key = beat.get("step") or 0, beat.get("micro_batch") or 0, beat.get("phase") or ""
            ranks_at.setdefault(key, []).append(rank)
        ages = {rank: self.now - beat["time"] for rank, beat in heartbeats.items()}
        lines = []
        for (step, micro_batch, phase), ranks in sorted(ranks_at.items()):
            position = f"step {step} micro-batch {micro_batch} {phase}".rstrip()
            age = format_clock(max(0.0, *(ages[rank] for rank in ranks)))
            lines.append(
                f"{len(ranks)} of {len(heartbeats)} ranks in {position}, "
                f"last heartbeat up to {age} ago: {format_ranks(ranks)}"
            )
        limit = self.state.silent_after
        silent = [rank for rank, age in ages.items() if age > limit]
        if silent and self.state.name != STOPPED:
            lines.append(f"SILENT for more than {limit:.0f} s: ranks {format_ranks(silent)}")
        return lines

    def lines(self) -> list[str]:
        """Return the plain lines."""
        return [
            *self.progress_lines(),
            *self.state_lines(),
            self.disk_line(),
            *self.rank_lines(),
            *self.problems,
        ]

    def view(self) -> RenderableType:
        """Return the view for a terminal: with a progress bar, the loss and the last events."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        title = Text(printable(f"{self.run.resolve().name}  "), style="bold")
        title.append(printable(self.state.label), style=f"bold {COLORS[self.state.tone]}")
        position, *lines = self.progress_lines()
        parts: list[RenderableType] = [title, Text(position)]
        if self.rows:
            first, last = self.rows[0]["step"], self.rows[-1]["step"]
            if self.total_steps:
                bar = Table.grid(padding=(0, 1))
                share = min(1.0, last / self.total_steps)
                progress = ProgressBar(total=1.0, completed=share, width=SPARKLINE_WIDTH)
                bar.add_row(progress, f"{share:.1%}")
                parts.append(bar)
            losses = [float(row["loss"]) for row in self.rows if row.get("loss") is not None]
            curve = sparkline(losses, SPARKLINE_WIDTH)
            parts.append(Text(f"{curve}  loss of steps {first:,} to {last:,}"))
        lines += [*self.state_lines(), self.disk_line(), *self.rank_lines(), *self.problems]
        parts += [Text(printable(line)) for line in lines]
        events, problems = newest_events(self.run)
        recent = [*map(event_line, events[-MAX_EVENTS:]), *problems]
        parts += [Text(printable(line), style="dim", overflow="ellipsis") for line in recent]
        return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` bars, each the mean of equally many values from the lowest to highest.

    A bar with a non-finite value is `NOT_FINITE`.
    """
    num_bars = min(width, len(values))
    bounds = [len(values) * index // num_bars for index in range(num_bars + 1)] if num_bars else []
    means = [
        math.fsum(values[start:end]) / (end - start)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((mean - low) * scale)] if math.isfinite(mean) else NOT_FINITE for mean in means
    )


def watch_run(run: Path, every: float | None) -> None:
    """Show the status every some seconds until the run has an exit.json. None: show it once."""
    with _display() as show:
        while True:
            status = Status.read(run, time.time())
            show(status)
            if every is None or status.state.end is not None:
                return
            time.sleep(max(0.0, every))


@contextmanager
def _display() -> Iterator[Callable[[Status], None]]:
    """Yield a function that shows the status: in place in a terminal, else as plain lines."""
    if not sys.stdout.isatty():
        yield lambda status: print("\n".join(status.lines()), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=getattr(sys.stdout, "unescaped", sys.stdout))
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield lambda status: live.update(status.view(), refresh=True)
