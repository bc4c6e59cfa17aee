"""Write the report of one or several runs as one HTML file that needs no network.

This module prepares the data of each section. `assets/sections.html` has a macro for each kind of
section, which shows its data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.report.curves import Chart, EventMarks, build_charts, build_marks
from torchtitan_like.report.events import HIDDEN_EVENTS, event_detail
from torchtitan_like.report.figures import draw
from torchtitan_like.report.goodput import CLASSES
from torchtitan_like.report.history import AttemptHistory, History, read_histories
from torchtitan_like.report.summary import compare, plan_event, summarize
from torchtitan_like.report.tolerant import as_time
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.run_directory import describe_error
from torchtitan_like.util.units import format_bytes, format_duration

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
MAX_ROWS = 500  # of a table of events or evaluations
NONE = "–"

_SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)

CLASS_COLORS = {
    "training": "#009e73",
    "start_up": "#56b4e9",
    "checkpoint": "#0072b2",
    "validation": "#cc79a7",
    "stall": "#d55e00",
    "skipped": "#8c564b",
    "repeated": "#e69f00",
    "shutdown": "#7f7f7f",
    "stopped": "#b5b5b5",
}


class Section(NamedTuple):
    """A section of the page. kind: the macro that shows `data`."""

    title: str
    kind: str
    data: Any


def render_page(
    histories: Sequence[History], *, is_redacted: bool, refresh_seconds: float | None = None
) -> str:
    """Return the HTML of the report of one or several runs.

    refresh_seconds: the browser reloads the page after this time; None: never.
    """
    sections = [
        Section(f"Summary of {one.run.name}", "summary", _summary(one)) for one in histories
    ]
    if len(histories) > 1:
        sections.append(Section("Comparison", "comparison", _comparison(histories)))
    charts = build_charts(histories)
    marks = [mark for history in histories for mark in build_marks(history)]
    shows_events = len(histories) == 1
    drawing = draw(charts, marks, shows_events=shows_events)
    if charts:
        drawn = list(zip(charts, drawing.charts, strict=True))
        sections.append(Section("Curves", "curves", _curves(drawn, marks, shows_events)))
    for history in histories:
        suffix = "" if len(histories) == 1 else f" of {history.run.name}"
        sections += [
            section._replace(title=f"{section.title}{suffix}") for section in _details(history)
        ]
    scripts = f"{drawing.scripts}<script>{_asset('page.js')}</script>"
    template = _templates().get_template("page.html")
    return template.render(
        title=", ".join(history.run.name for history in histories),
        sections=sections,
        is_redacted=is_redacted,
        refresh_seconds=refresh_seconds,
        written=time.time(),
        policy=_policy(scripts),
        style=_asset("page.css"),
        scripts=scripts,
    )


def _policy(scripts: str) -> str:
    """Return a Content-Security-Policy: the browser runs these scripts and loads nothing else."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        for code in _SCRIPT.findall(scripts)
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
    environment.filters |= {"number": _number, "percent": _percent, "clock": _clock}
    environment.globals |= {
        "class_colors": CLASS_COLORS,
        "max_rows": MAX_ROWS,
        "hidden_events": HIDDEN_EVENTS,
    }
    return environment


def _asset(name: str) -> str:
    """Return the text of an asset."""
    return (ASSETS / name).read_text(encoding="utf-8")


# ---- the summary


def _summary(history: History) -> dict[str, Any]:
    numbers = summarize(history)
    problems = list(numbers["problems"])
    if numbers["num_clock_jumps"]:
        problems.append(
            f"Times that are earlier than the one before them: {numbers['num_clock_jumps']:,}. "
            "Clocks differ between nodes or were set. Each counts as equal to the one before it"
        )
    return {
        "description": numbers["description"],
        "tiles": [(name, text) for name, text in _tiles(history, numbers) if text != NONE],
        "problems": problems,
        "waterfall": list(_waterfall(history)),
    }


def _tiles(history: History, numbers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each number of the summary."""
    loss, median = numbers["loss"], numbers["median"]
    smoothed = f"mean of {loss['smoothing_window']} rows: {_number(loss['last_smoothed'])}"
    yield "goodput", _percent(numbers["goodput"])
    yield "state", history.run.state.line
    yield "step", _of(numbers["step"], numbers["total_steps"])
    yield "tokens", _number(numbers["tokens"])
    yield "wall time", format_duration(numbers["wall_seconds"])
    yield "model", numbers["model"] or NONE
    yield "parameters", _number(numbers["num_parameters"])
    yield "loss", f"{_number(loss['last'])} ({smoothed})"
    for name, validation in numbers["validation"].items():
        best = validation["best"]
        text = _number(validation["last"])
        if best is not None:
            text += f" (best: {_number(best['value'])} at step {best['step']:,})"
        yield f"validation loss {name}".rstrip(), text
    yield "tokens/s and device", f"{_number(median['tps'])} (median)"
    yield "MFU", NONE if median["mfu"] is None else f"{median['mfu']:.1f} % (median)"
    yield "memory", f"{_number(numbers['max_memory_gib'])} GiB (largest)"
    yield "skipped steps", _number(numbers["num_skipped_steps"])
    yield "attempts", _number(len(numbers["attempts"]))


class BarRow(NamedTuple):
    """A row of the table of goodput. part: class, start and length as fractions of the whole."""

    label: str
    meaning: str
    seconds: float
    share: float
    part: tuple[str, float, float]
    style: str = ""


def _waterfall(history: History) -> Iterator[BarRow]:
    """Yield a row for each class of time with its spans in the wall time; none without times."""
    goodput = history.goodput
    wall = goodput.wall
    if wall <= 0:
        return
    meaning = "from the first start to the end"
    yield BarRow("wall time", meaning, wall, 1.0, ("training", 0.0, 1.0), "outline")
    offset = 1.0
    for name in CLASSES:
        if name != "training":
            seconds = goodput.seconds[name]
            share = seconds / wall
            offset -= share
            part = (name, offset, share)
            yield BarRow(name.replace("_", "-"), CLASSES[name], seconds, share, part)
    part = ("training", 0.0, goodput.share)
    seconds = goodput.seconds["training"]
    yield BarRow("training (goodput)", CLASSES["training"], seconds, goodput.share, part)


# ---- curves


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


# ---- several runs


def _comparison(histories: Sequence[History]) -> dict[str, Any]:
    result = compare(histories)
    losses = []
    for title, key, unit in (
        ("Loss at equal tokens", "loss_at_equal_tokens", "tokens"),
        ("Loss at equal time", "loss_at_equal_hours", "hours since the start"),
    ):
        rows = [
            [
                _number(row["at"]),
                *(
                    NONE if loss is None else f"{_number(loss)} (step {step:,})"
                    for loss, step in zip(row["loss"], row["step"], strict=True)
                ),
            ]
            for row in result[key]
        ]
        losses.append((title, unit, rows))
    return {
        "names": [history.run.name for history in histories],
        "differences": [
            [key, *map(_setting, values)] for key, values in result["config_differences"].items()
        ],
        "losses": losses,
    }


# ---- the other sections of a run


def _details(history: History) -> list[Section]:
    """Return the sections after the curves. A section without data is left out."""
    sections = [
        Section("Attempts", "attempts", _attempts(history)),
        Section("Plan", "plan", _plan(history)),
        Section("Last error", "error", _last_error(history)),
        Section("Warnings", "warnings", _warnings(history)),
        Section("Events", "events", _events(history)),
        Section("Checkpoints", "checkpoints", _checkpoints(history)),
        Section("Evaluations", "evaluations", _evaluations(history)),
        Section("Configuration", "configuration", _configuration(history)),
        Section("Environment", "environment", _environment(history)),
    ]
    return [section for section in sections if section.data]


def _attempts(history: History) -> dict[str, Any]:
    return {
        "colors": {
            name: color
            for name, color in CLASS_COLORS.items()
            if history.goodput.seconds[name] > 0 and name != "stopped"
        },
        "rows": [_attempt_row(history, attempt) for attempt in history.attempts],
    }


def _attempt_row(
    history: History, attempt: AttemptHistory
) -> tuple[list[str], list[tuple[str, float, float]]]:
    """Return the cells of an attempt and the parts of its bar."""
    wall = history.goodput.wall
    offset, parts = attempt.times.start - history.origin, []
    for name, seconds in attempt.seconds.items():
        if wall > 0 and name != "stopped" and seconds > 0:
            parts.append((name, offset / wall, seconds / wall))
            offset += seconds
    steps = NONE
    if attempt.first_step is not None and attempt.last_step is not None:
        steps = f"{attempt.first_step:,} to {attempt.last_step:,}"
    cells = [
        str(attempt.recorded.number),
        _clock(attempt.times.start),
        format_duration(max(0.0, attempt.times.end - attempt.times.start)),
        steps,
        _number(attempt.recorded.num_ranks),
        attempt.ended,
    ]
    return cells, parts


def _plan(history: History) -> dict[str, Any]:
    """Return the newest comparison of predicted with measured memory and time, on rank 0."""
    event = plan_event(history)
    if event is None:
        return {}
    rows = []
    for name, unit, planned, measured in (
        ("reserved memory", "GiB", "planned_reserved_gib", "reserved_gib"),
        ("step time", "s", "planned_step_s", "step_s"),
    ):
        before, after = as_time(event.get(planned)), as_time(event.get(measured))
        share = _signed_percent(after / before - 1) if before and after is not None else ""
        rows.append([f"{name}, {unit}", _number(before), _number(after), share])
    return {"rows": rows, "gpu": str(event.get("gpu"))}


def _last_error(history: History) -> dict[str, Any]:
    for attempt in reversed(history.attempts):
        error = attempt.recorded.error
        if error is None:
            continue
        number = attempt.recorded.number
        if "traceback" not in error:
            return {"number": number, "has_traceback": False, "text": event_detail(error)}
        try:
            text = describe_error(error)
        except (KeyError, TypeError, ValueError, OverflowError, OSError, AttributeError):
            text = json.dumps(error, indent=1, default=str)
        return {"number": number, "has_traceback": True, "text": text}
    return {}


def _warnings(history: History) -> list[list[str]]:
    return [
        [str(a.recorded.number), w.time, w.level, w.text, _number(w.count)]
        for a in history.attempts
        for w in a.recorded.warnings
    ]


def _events(history: History) -> list[list[str]]:
    return [
        [
            str(event["event"]),
            _number(as_time(event.get("step"))),
            _clock(as_time(event.get("time"))),
            event_detail(event),
        ]
        for event in history.events
    ]


def _checkpoints(history: History) -> list[list[str]]:
    seconds = {}
    for event in history.run.events:
        if event["event"] == "save" and as_time(event.get("seconds")) is not None:
            form = "full" if event.get("form") == "full" else str(event.get("form"))
            seconds[event.get("step"), form] = float(event["seconds"])
    rows = []
    for checkpoint in history.run.checkpoints:
        took = seconds.get((checkpoint.step, checkpoint.kind))
        rows.append(
            [
                checkpoint.name,
                f"{checkpoint.step:,}",
                checkpoint.kind,
                format_bytes(checkpoint.num_bytes),
                NONE if took is None else f"{took:.2f} s",
                checkpoint.state,
                "yes" if checkpoint.is_pinned else "no",
                checkpoint.layout,
            ]
        )
    return rows


def _evaluations(history: History) -> dict[str, Any]:
    rows = history.run.evals
    if not rows:
        return {}
    head = list(dict.fromkeys(key for row in rows for key in row))
    return {"head": head, "rows": [[_setting(row.get(key)) for key in head] for row in rows]}


def _configuration(history: History) -> dict[str, Any]:
    if not history.run.config:
        return {}
    changes = [
        [f"attempt {attempt.recorded.number}", key, _setting(before), _setting(after)]
        for attempt in history.attempts
        for key, (before, after) in attempt.changes.items()
    ]
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in history.run.config.items():
        sections.setdefault(key.partition(".")[0], []).append((key, _setting(value)))
    changed = {key for _, key, _, _ in changes}
    return {
        "changes": changes,
        "changed": changed,
        "sections": [
            (name, settings, any(key in changed for key, _ in settings))
            for name, settings in sections.items()
        ],
    }


def _environment(history: History) -> dict[str, Any]:
    """Return the files of the newest attempt that recorded its environment."""
    newest = next((a.recorded for a in reversed(history.attempts) if a.recorded.environment), None)
    return {} if newest is None else {"number": newest.number, "files": newest.environment}


# ---- text


def _setting(value: Any) -> str:
    return (
        NONE
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, default=str)
    )


def _number(value: float | None) -> str:
    """Return an integer with separators, another number with 5 digits, or a dash."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.5g}"


def _of(value: float | None, total: float | None) -> str:
    return _number(value) if total is None else f"{_number(value)} of {_number(total)}"


def _signed_percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


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
) -> int:
    """Replace the page. Returns its number of bytes."""
    text = render_page(histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds)
    html = text.encode(errors="replace")
    write_atomically(page, html)
    return len(html)
