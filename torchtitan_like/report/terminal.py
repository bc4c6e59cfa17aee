"""Draw the status of a run in a terminal, with Rich."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchtitan_like.report.curves import event_detail
from torchtitan_like.report.files import newest_events
from torchtitan_like.report.recorded import as_time
from torchtitan_like.report.state import RUNNING, find_state
from torchtitan_like.report.status import (
    NO_STEP,
    Progress,
    disk_line,
    heartbeat_lines,
    read_progress,
    state_lines,
)
from torchtitan_like.util.output import printable

BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
SPARKLINE_WIDTH = 60  # characters
MAX_EVENTS = 5
GOOD_STATES = (RUNNING, "stopped: done")


def status_view(run: Path, now: float) -> RenderableType:
    """Return the view of `titan run watch`: progress, loss, rate, ranks and the last events.

    now: Unix time. Raises OSError, and ValueError if `run` is not a run directory or a file is
    damaged.
    """
    progress = read_progress(run)
    state = find_state(run, [] if progress is None else progress.rows, now)
    title = Text(printable(f"{run.resolve().name}  "), style="bold")
    color = "green" if state.label in GOOD_STATES else "red"
    title.append(printable(state.label), style=f"bold {color}")
    parts: list[RenderableType] = [title]
    if progress is None:
        parts.append(Text(NO_STEP))
    else:
        parts += _progress_view(progress, now)
    lines = [*state_lines(state), disk_line(run), *heartbeat_lines(run, now)]
    parts += [Text(printable(line)) for line in lines]
    parts += [Text(printable(line), style="dim", overflow="ellipsis") for line in _event_lines(run)]
    return Group(*parts)


def _progress_view(progress: Progress, now: float) -> Iterable[RenderableType]:
    yield Text(progress.position_line(now))
    if progress.total_steps:
        bar = Table.grid(padding=(0, 1))
        share = min(1.0, progress.step / progress.total_steps)
        bar.add_row(ProgressBar(total=1.0, completed=share, width=SPARKLINE_WIDTH), f"{share:.1%}")
        yield bar
    losses = [float(row["loss"]) for row in progress.rows if row.get("loss") is not None]
    first, last = progress.rows[0]["step"], progress.step
    yield Text(f"{sparkline(losses, SPARKLINE_WIDTH)}  loss of steps {first:,} to {last:,}")
    yield Text(progress.loss_line())
    for line in progress.rate_lines():
        yield Text(line)


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


def _event_lines(run: Path) -> list[str]:
    """Return a line for each of the newest events; the problem if they cannot be read."""
    try:
        events = newest_events(run)[-MAX_EVENTS:]
    except (OSError, ValueError) as error:
        return [str(error)]
    lines = []
    for event in events:
        seconds = as_time(event.get("time"))
        clock = "" if seconds is None else time.strftime("%H:%M:%S ", time.localtime(seconds))
        step = "" if event.get("step") is None else f" at step {event['step']}"
        lines.append(f"{clock}{event['event']}{step}: {event_detail(event)}".removesuffix(": "))
    return lines
