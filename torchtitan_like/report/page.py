"""Write the report of one or several runs as one HTML file that needs no network.

This module prepares the data that the templates in `assets/` show. `runs.html` has a macro for each
kind of section.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.report.curves import Chart, EventMarks, build_charts, build_marks, run_color
from torchtitan_like.report.events import CLASS_COLORS, HIDDEN_EVENTS, event_detail, format_value
from torchtitan_like.report.figures import draw
from torchtitan_like.report.goodput import CLASSES
from torchtitan_like.report.history import AttemptHistory, History, read_histories
from torchtitan_like.report.summary import compare, plan_event, summarize
from torchtitan_like.report.tolerant import Row, as_time
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.run_directory import describe_error
from torchtitan_like.util.units import format_bytes, format_clock, format_duration

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
MAX_ROWS = 500  # of a table of events or evaluations
NONE = "–"

_SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)


class Table(NamedTuple):
    """A table above the curves. note: a sentence below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str


class Number(NamedTuple):
    """A number of the summary. note: what it is of, in small letters."""

    name: str
    text: str
    note: str = ""


class Run(NamedTuple):
    """What the templates show of a run. sections: macro and title of each one."""

    history: History
    color: str
    summary: dict[str, Any]
    numbers: dict[str, Number]
    sections: list[tuple[str, str]]

    @classmethod
    def of(cls, history: History, color: str) -> Run:
        """Compute the numbers of a run. Its sections are those with data."""
        summary = summarize(history)
        numbers = {number.name: number for number in _numbers(summary)}
        return cls(history, color, summary, numbers, list(_sections(history)))


def render_page(
    histories: Sequence[History],
    *,
    is_redacted: bool,
    refresh_seconds: float | None = None,
    table: Table | None = None,
) -> str:
    """Return the HTML of the report of one or several runs.

    refresh_seconds: the browser reloads the page after this time; None: never.
    table: shown first; None: no table.
    """
    runs = [
        Run.of(history, run_color(index, len(histories))) for index, history in enumerate(histories)
    ]
    charts = build_charts(histories)
    marks = [mark for history in histories for mark in build_marks(history)]
    shows_events = len(histories) == 1
    drawing = draw(charts, marks, shows_events=shows_events)
    script = _asset("page.js")
    drawn = list(zip(charts, drawing.charts, strict=True))
    return (
        _templates()
        .get_template("page.html")
        .render(
            runs=runs,
            title=", ".join(history.run.name for history in histories),
            table=table,
            comparison=compare(histories) if len(histories) > 1 else None,
            curves=_curves(drawn, marks, shows_events) if charts else None,
            is_redacted=is_redacted,
            refresh_seconds=refresh_seconds,
            written=time.time(),
            policy=_policy([*_SCRIPT.findall(drawing.scripts), script]),
            style=_asset("page.css"),
            drawing_scripts=drawing.scripts,
            script=script,
        )
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy: the browser runs these scripts and loads nothing else."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        for code in scripts
    ]
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; "
        "style-src 'unsafe-inline'; img-src data:; connect-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )


def _templates() -> Environment:
    """Return the environment of the templates. It escapes all text without the filter `safe`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "clock": _clock,
        "size": format_bytes,
        "duration": format_duration,
        "elapsed": format_clock,
        "setting": _setting,
        "detail": event_detail,
        "value": format_value,
        "time": as_time,
    }
    environment.globals |= {
        "class_colors": CLASS_COLORS,
        "class_meanings": CLASSES,
        "max_rows": MAX_ROWS,
        "hidden_events": HIDDEN_EVENTS,
        "none_text": NONE,
        "bar_parts": _bar_parts,
        "plan_event": plan_event,
        "plan_rows": _plan_rows,
        "last_error": _last_error,
        "save_seconds": _save_seconds,
        "changed_settings": _changed_settings,
    }
    return environment


def _asset(name: str) -> str:
    """Return the text of an asset."""
    return (ASSETS / name).read_text(encoding="utf-8")


# ---- what the templates show


def _numbers(summary: Mapping[str, Any]) -> Iterator[Number]:
    """Yield the numbers of a summary that are known, with their units."""
    loss, median = summary["loss"], summary["median"]
    window = loss["smoothing_window"]
    share = "" if not summary["total_steps"] else f"of {_number(summary['total_steps'])}"
    yield Number("step", _number(summary["step"]), share)
    if loss["last"] is not None:
        mean = f"nats per token; mean of {window} rows {_number(loss['last_smoothed'])}"
        yield Number("training loss", _number(loss["last"]), mean)
    for name, validation in summary["validation"].items():
        best = validation["best"]
        note = "" if best is None else f"best {_number(best['value'])} at step {best['step']:,}"
        title = "validation loss" if name in ("", "validation") else f"validation loss, {name}"
        yield Number(title, _number(validation["last"]), note)
    if median["tps"] is not None:
        yield Number("throughput", f"{_number(median['tps'])} tokens/s", "each device, median")
    if median["mfu"] is not None:
        yield Number("MFU", f"{median['mfu']:.1f} %", "of the peak, median")
    if median["step_s"] is not None:
        yield Number("step time", f"{_number(median['step_s'])} s", "median")
    if summary["max_memory_gib"] is not None:
        yield Number("memory", f"{summary['max_memory_gib']:.2f} GiB", "largest, rank 0")
    wall = format_clock(summary["wall_seconds"])
    yield Number("goodput", _percent(summary["goodput"]), f"of {wall} wall time")
    if summary["tokens"] is not None:
        yield Number("tokens", _number(summary["tokens"]))
    if summary["model"] is not None:
        size = summary["num_parameters"]
        note = "" if size is None else f"{_number(size)} parameters"
        yield Number("model", summary["model"], note)
    yield Number("attempts", _number(len(summary["attempts"])))
    if summary["num_skipped_steps"]:
        yield Number("skipped steps", _number(summary["num_skipped_steps"]))


def _sections(history: History) -> Iterator[tuple[str, str]]:
    """Yield macro and title of each section of a run that has data."""
    run = history.run
    sections = (
        ("goodput", "Where the wall time went", history.goodput.wall > 0),
        ("attempts", "Attempts", True),
        ("plan", "Plan", plan_event(history)),
        ("warnings", "Warnings", any(attempt.warnings for attempt in run.attempts)),
        ("events", "Events", history.events),
        ("checkpoints", "Checkpoints", run.checkpoints),
        ("evaluations", "Evaluations", run.evals),
        ("configuration", "Configuration", run.config),
        ("environment", "Environment", any(attempt.environment for attempt in run.attempts)),
    )
    return ((name, title) for name, title, data in sections if data)


def _changed_settings(history: History) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from their defaults, with default and value."""
    from torchtitan_like.config import JobConfig
    from torchtitan_like.config.layers import leaves

    defaults = {
        ".".join(path): value for path, value in leaves(JobConfig().model_dump(mode="json"))
    }
    return {
        key: (defaults.get(key), value)
        for key, value in history.run.config.items()
        if value != defaults.get(key)
    }


def _curves(
    drawn: Sequence[tuple[Chart, str]], marks: Sequence[EventMarks], shows_events: bool
) -> dict[str, Any]:
    """drawn: each chart with its HTML."""
    steps = [step for chart, _ in drawn for curve in chart.curves for step in curve.step]
    by_section = groupby(drawn, lambda pair: pair[0].section)
    return {
        "first": int(min(steps)),
        "last": int(max(steps)),
        "colors": {mark.kind: mark.color for mark in marks},
        "shows_events": shows_events,
        "charts": [(section, list(pairs)) for section, pairs in by_section],
        "marks": [mark for mark in marks if mark.num_recorded > len(mark.step)],
    }


def _bar_parts(history: History, attempt: AttemptHistory) -> list[tuple[str, float, float]]:
    """Return class, start and length of each part of an attempt's bar, as shares of the wall time."""
    wall = history.goodput.wall
    offset, parts = attempt.times.start - history.origin, []
    for name, seconds in attempt.seconds.items():
        if wall > 0 and name != "stopped" and seconds > 0:
            parts.append((name, offset / wall, seconds / wall))
            offset += seconds
    return parts


def _plan_rows(event: Row) -> list[list[str]]:
    """Return planned and measured memory and time on rank 0, and the relative difference."""
    rows = []
    for name, unit, planned, measured in (
        ("reserved memory", "GiB", "planned_reserved_gib", "reserved_gib"),
        ("step time", "s", "planned_step_s", "step_s"),
    ):
        before, after = as_time(event.get(planned)), as_time(event.get(measured))
        share = f"{100 * (after / before - 1):+.1f} %" if before and after is not None else ""
        rows.append([f"{name}, {unit}", _number(before), _number(after), share])
    return rows


def _last_error(history: History) -> tuple[int, str] | None:
    """Return the attempt and the text of the newest error; None without one."""
    for attempt in reversed(history.attempts):
        error = attempt.recorded.error
        if error is not None:
            try:
                return attempt.recorded.number, describe_error(error)
            except (KeyError, TypeError, ValueError, OverflowError, OSError, AttributeError):
                return attempt.recorded.number, event_detail(error)
    return None


def _save_seconds(history: History, step: int, form: str) -> float | None:
    """Return how long a checkpoint took; None if it is unknown."""
    for event in history.run.events:
        if (event["event"], event.get("step"), str(event.get("form"))) == ("save", step, form):
            return as_time(event.get("seconds"))
    return None


# ---- text


def _setting(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_setting(item)}" for key, item in value.items()) or NONE
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value)) or NONE
    return str(value)


def _number(value: float | None) -> str:
    """Return a large number or an integer with separators, another with 5 digits, or a dash."""
    if value is None:
        return NONE
    is_long = math.isfinite(value) and (float(value).is_integer() or abs(value) >= 10_000)
    return f"{value:,.0f}" if is_long else f"{value:.5g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _clock(seconds: float | None) -> str:
    """Return a time in UTC, so that the page does not depend on the machine that writes it."""
    if seconds is None:
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return str(seconds)


# ---- files


def write_pages(
    page: Path, runs: Sequence[Path], every: float | None, *, is_redacted: bool
) -> Iterator[int]:
    """Write the page every some seconds until each run has an exit.json. None: write it once.

    Yields the number of bytes of the first page and of the last one.
    """
    is_first = True
    while True:
        histories = read_histories(runs, is_redacted=is_redacted)
        has_ended = all(history.run.state.end is not None for history in histories)
        refresh_seconds = None if has_ended else every
        num_bytes = write_page(
            page, histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds
        )
        if is_first or refresh_seconds is None:
            yield num_bytes
        if refresh_seconds is None:
            return
        is_first = False
        time.sleep(refresh_seconds)


def write_page(
    page: Path,
    histories: Sequence[History],
    *,
    is_redacted: bool,
    refresh_seconds: float | None = None,
    table: Table | None = None,
) -> int:
    """Replace the page. Returns its number of bytes. See `render_page`."""
    text = render_page(
        histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds, table=table
    )
    html = text.encode(errors="replace")
    write_atomically(page, html)
    return len(html)
