"""Write the report of one or several runs as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchtitan_like.report.curves import (
    HIDDEN_EVENTS,
    Chart,
    EventMarks,
    build_charts,
    build_marks,
    event_detail,
)
from torchtitan_like.report.figures import draw
from torchtitan_like.report.goodput import CLASSES
from torchtitan_like.report.history import History
from torchtitan_like.report.recorded import as_time
from torchtitan_like.report.summary import compare, plan_event, summarize
from torchtitan_like.report.tolerant import Row
from torchtitan_like.util.run_directory import describe_error
from torchtitan_like.util.units import format_bytes, format_duration

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


def render_page(
    histories: Sequence[History], *, is_redacted: bool, refresh_seconds: float | None = None
) -> str:
    """Return the HTML of the report of one or several runs.

    refresh_seconds: the browser reloads the page after this time; None: never.
    """
    sections = [(f"Summary of {one.run.name}", _summary(one)) for one in histories]
    if len(histories) > 1:
        sections.append(("Comparison", _comparison(histories)))
    charts = build_charts(histories)
    marks = [mark for history in histories for mark in build_marks(history)]
    shows_events = len(histories) == 1
    drawing = draw(charts, marks, shows_events=shows_events)
    if charts:
        sections.append(("Curves", _curves(charts, marks, drawing.charts, shows_events)))
    for history in histories:
        suffix = "" if len(histories) == 1 else f" of {history.run.name}"
        sections += [(f"{title}{suffix}", html) for title, html in _details(history) if html]
    links = "".join(
        f'<a href="#s{number}">{escape(title)}</a>' for number, (title, _) in enumerate(sections)
    )
    main = "".join(
        f'<section id="s{number}"><h2>{escape(title)}</h2>{html}</section>'
        for number, (title, html) in enumerate(sections)
    )
    names = ", ".join(history.run.name for history in histories)
    note = "<p>Environment, paths, host names and log text are left out.</p>" if is_redacted else ""
    if refresh_seconds is not None:
        written = _clock(time.time())
        note += f"<p>Written at {written} UTC, and again every {refresh_seconds:g} s.</p>"
    header = f'<h1>{escape(names)}</h1>{note}<nav aria-label="Sections">{links}</nav>'
    scripts = f"{drawing.scripts}<script>{_asset('page.js')}</script>"
    return _document(names, header, main, scripts, refresh_seconds)


def _document(
    title: str, header: str, main: str, scripts: str, refresh_seconds: float | None
) -> str:
    """Return a page that loads nothing from elsewhere, whatever its content is.

    scripts: elements; the browser runs no others.
    """
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        for code in _SCRIPT.findall(scripts)
    ]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; "
        "style-src 'unsafe-inline'; img-src data:; connect-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )
    refresh = ""
    if refresh_seconds is not None:
        refresh = f'<meta http-equiv="refresh" content="{math.ceil(refresh_seconds)}">'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body><header>{header}</header><main>{main}</main>{scripts}</body></html>\n"
    )


def _asset(name: str) -> str:
    """Return the text of an asset."""
    return (ASSETS / name).read_text(encoding="utf-8")


# ---- summary


def _summary(history: History) -> str:
    numbers = summarize(history)
    loss, tokens = numbers["loss"], numbers["tokens"]
    tiles = [
        ("goodput", _percent(numbers["goodput"])),
        ("state", history.run.state.line),
        ("step", _of(numbers["step"], numbers["total_steps"])),
        ("tokens", _number(tokens)),
        ("wall time", format_duration(numbers["wall_seconds"])),
        ("model", numbers["model"] or NONE),
        ("parameters", _number(numbers["num_parameters"])),
        ("loss", f"{_number(loss['last'])} (mean of {loss['smoothing_window']} rows: "
                 f"{_number(loss['last_smoothed'])})"),
    ]  # fmt: skip
    for name, validation in numbers["validation"].items():
        best = validation["best"]
        text = f"{_number(validation['last'])}"
        if best is not None:
            text += f" (best: {_number(best['value'])} at step {best['step']:,})"
        tiles.append((f"validation loss {name}".rstrip(), text))
    median = numbers["median"]
    tiles += [
        ("tokens/s and device", f"{_number(median['tps'])} (median)"),
        ("MFU", NONE if median["mfu"] is None else f"{median['mfu']:.1f} % (median)"),
        ("memory", f"{_number(numbers['max_memory_gib'])} GiB (largest)"),
        ("skipped steps", _number(numbers["num_skipped_steps"])),
        ("attempts", _number(len(numbers["attempts"]))),
    ]
    tiles = [(name, text) for name, text in tiles if text != NONE]
    html = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles)
    description = numbers["description"]
    intro = f"<p>{escape(str(description))}</p>" if description else ""
    return f'{intro}<dl class="tiles">{html}</dl>{_problems(numbers)}{_waterfall(history)}'


def _problems(numbers: dict[str, Any]) -> str:
    problems = list(numbers["problems"])
    if numbers["num_clock_jumps"]:
        problems.append(
            f"Times that are earlier than the one before them: {numbers['num_clock_jumps']:,}. "
            "Clocks differ between nodes or were set. Each counts as equal to the one before it"
        )
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<div class="problems"><strong>Not read in full</strong><ul>{items}</ul></div>'


def _waterfall(history: History) -> str:
    """Return the table of goodput: each class of time, and where it lies in the wall time."""
    goodput = history.goodput
    wall = goodput.wall
    if wall <= 0:
        return "<p>No times are recorded.</p>"
    rows = [_bar_row("wall time", wall, 1.0, [("training", 0.0, 1.0)], "outline", "")]
    offset = 1.0
    losses = [name for name in CLASSES if name != "training"]
    for name in losses:
        share = goodput.seconds[name] / wall
        offset -= share
        bar = [(name, offset, share)]
        rows.append(_bar_row(name.replace("_", "-"), goodput.seconds[name], share, bar, "", name))
    rows.append(
        _bar_row(
            "training (goodput)",
            goodput.seconds["training"],
            goodput.share,
            [("training", 0.0, goodput.share)],
            "",
            "training",
        )
    )
    head = "<tr><th>time</th><th>seconds</th><th>share</th><th></th></tr>"
    return (
        "<h3>Where the wall time went</h3>"
        f'<div class="scroll"><table class="bars"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _bar_row(
    label: str,
    seconds: float,
    share: float,
    parts: Sequence[tuple[str, float, float]],
    style: str,
    name: str,
) -> str:
    meaning = CLASSES.get(name, "from the first start to the end")
    return (
        f'<tr><th scope="row">{escape(label)}<small>{escape(meaning)}</small></th>'
        f"<td>{seconds:,.1f}</td><td>{_percent(share)}</td>"
        f"<td>{_bar(parts, style)}</td></tr>"
    )


def _bar(parts: Sequence[tuple[str, float, float]], style: str = "") -> str:
    """Return a bar with colored parts: class, start and length as fractions of the whole."""
    html = "".join(
        f'<i style="left:{100 * max(0.0, start):.3f}%;width:{100 * length:.3f}%;'
        f'background:{CLASS_COLORS[name]}" title="{escape(name)}: {_percent(length)}"></i>'
        for name, start, length in parts
        if length > 0
    )
    return f'<div class="bar {style}" aria-hidden="true">{html}</div>'


# ---- curves


def _curves(
    charts: Sequence[Chart], marks: Sequence[EventMarks], html: Sequence[str], shows_events: bool
) -> str:
    kinds = dict.fromkeys(mark.kind for mark in marks)
    colors = {mark.kind: mark.color for mark in marks}
    boxes = "".join(
        f'<label><input type="checkbox" data-event="{escape(kind)}"'
        f'{" checked" if shows_events else ""}><b style="background:{colors[kind]}"></b>'
        f"{escape(kind)}</label>"
        for kind in kinds
    )
    axes = "".join(
        f'<label><input type="radio" name="x" value="{name}"{checked}>{name}</label>'
        for name, checked in (("step", " checked"), ("tokens", ""), ("hours", ""))
    )
    steps = [step for chart in charts for curve in chart.curves for step in curve.step]
    first, last = int(min(steps)), int(max(steps))
    parts = [
        '<form class="controls" autocomplete="off">'
        f"<fieldset><legend>Horizontal axis</legend>{axes}</fieldset>"
        '<fieldset><legend>Scale</legend><label><input type="checkbox" id="log">log axes of loss '
        "and gradient norm</label></fieldset>",
        f"<fieldset><legend>Events</legend>{boxes}</fieldset>" if boxes else "",
        "<fieldset><legend>Read a step</legend>"
        f'<input type="range" id="cursor" aria-label="step" min="{first}" max="{last}" '
        f'value="{last}"><input type="number" id="cursor-step" aria-label="step" min="{first}" '
        f'max="{last}" value="{last}"></fieldset></form>',
    ]
    section = ""
    for chart, drawn in zip(charts, html, strict=True):
        if chart.section != section:
            parts.append("</div>" if section else "")
            parts.append(f'<h3>{escape(chart.section)}</h3><div class="charts">')
            section = chart.section
        parts.append(f"<figure><figcaption>{_chart_caption(chart)}</figcaption>{drawn}</figure>")
    parts.append(
        "</div><h3>Values at the step</h3>"
        '<div class="scroll"><table id="values" aria-live="polite"><thead><tr><th>curve</th>'
        "<th>step</th><th>value</th></tr></thead><tbody></tbody></table></div>"
    )
    for mark in marks:
        if mark.num_recorded > len(mark.step):
            parts.append(
                f"<p>{escape(mark.run)}: {len(mark.step):,} of {mark.num_recorded:,} events "
                f"{escape(mark.kind)} are drawn.</p>"
            )
    return "".join(parts)


def _chart_caption(chart: Chart) -> str:
    """Return the chart as text: title, and the first and last value of each curve."""
    unit = f", {escape(chart.unit)}" if chart.unit else ""
    texts = [
        f"{escape(curve.label)}: {_number(float(curve.values[0]))} → "
        f"{_number(float(curve.values[-1]))}"
        for curve in chart.curves
        if not curve.is_raw
    ]
    return f"<strong>{escape(chart.title)}</strong>{unit}<br>{'; '.join(texts)}"


# ---- several runs


def _comparison(histories: Sequence[History]) -> str:
    result = compare(histories)
    names = [history.run.name for history in histories]
    differences = [
        [key, *map(_setting, values)] for key, values in result["config_differences"].items()
    ]
    parts = ["<h3>Settings that differ</h3>", _table(["setting", *names], differences)]
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
        parts += [f"<h3>{title}</h3>", _table([unit, *names], rows)]
    return "".join(parts)


# ---- the other sections of a run


def _details(history: History) -> Iterable[tuple[str, str]]:
    yield "Attempts", _attempts(history)
    yield "Plan", _plan(history)
    yield "Last error", _last_error(history)
    yield "Warnings", _warnings(history)
    yield "Events", _events(history)
    yield "Checkpoints", _checkpoints(history)
    yield "Evaluations", _evals(history.run.evals)
    yield "Configuration", _config(history)
    yield "Environment", _environment(history)


def _attempts(history: History) -> str:
    wall = history.goodput.wall
    rows = []
    for attempt in history.attempts:
        start = attempt.times.start - history.origin
        spent = {k: v for k, v in attempt.seconds.items() if k != "stopped" and v > 0}
        offset, parts = start, []
        for name, seconds in spent.items():
            if wall > 0:
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
        rows.append(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}"
            f"<td>{_bar(parts)}</td></tr>"
        )
    keys = "".join(
        f'<span><b style="background:{color}"></b>{name.replace("_", "-")}</span>'
        for name, color in CLASS_COLORS.items()
        if history.goodput.seconds[name] > 0 and name != "stopped"
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("attempt", "start (UTC)", "duration", "steps", "ranks", "ended", "timeline")
    )
    return (
        f'<p class="keys">{keys}</p><div class="scroll"><table class="bars">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p>The bar of an attempt lies where the attempt lies in the wall time. The lengths of its "
        "parts are its seconds in each class.</p>"
    )


def _last_error(history: History) -> str:
    for attempt in reversed(history.attempts):
        error = attempt.recorded.error
        if error is None:
            continue
        number = attempt.recorded.number
        if "traceback" not in error:
            return f"<p>Attempt {number}: {escape(event_detail(error))}</p>"
        try:
            text = describe_error(error)
        except (KeyError, TypeError, ValueError, OverflowError, OSError, AttributeError):
            text = json.dumps(error, indent=1, default=str)
        return f'<p>Attempt {number}</p><pre tabindex="0">{escape(text)}</pre>'
    return ""


def _warnings(history: History) -> str:
    rows = [
        [str(a.recorded.number), w.time, w.level, w.text, _number(w.count)]
        for a in history.attempts
        for w in a.recorded.warnings
    ]
    return _table(["attempt", "first time", "level", "text", "count"], rows) if rows else ""


def _events(history: History) -> str:
    rows = [
        [
            str(event["event"]),
            _number(as_time(event.get("step"))),
            _clock(as_time(event.get("time"))),
            event_detail(event),
        ]
        for event in history.events
    ]
    if not rows:
        return ""
    hidden = ", ".join(HIDDEN_EVENTS)
    return (
        _table(["event", "step", "time (UTC)", "detail"], rows)
        + f"<p>Not on the curves: {hidden}, and events without a step.</p>"
    )


def _plan(history: History) -> str:
    """Return the newest comparison of predicted with measured memory and time, on rank 0."""
    event = plan_event(history)
    if event is None:
        return ""
    rows = []
    for name, unit, planned, measured in (
        ("reserved memory", "GiB", "planned_reserved_gib", "reserved_gib"),
        ("step time", "s", "planned_step_s", "step_s"),
    ):
        before, after = as_time(event.get(planned)), as_time(event.get(measured))
        share = _signed_percent(after / before - 1) if before and after is not None else ""
        rows.append([f"{name}, {unit}", _number(before), _number(after), share])
    head = ["on rank 0", "planned", "measured", "measured - planned"]
    where = f"<p>Planned for {escape(str(event.get('gpu')))}.</p>"
    return _table(head, rows) + where


def _checkpoints(history: History) -> str:
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
    if not rows:
        return ""
    head = ["checkpoint", "step", "kind", "size", "saved in", "files", "pinned", "layout"]
    return (
        _table(head, rows)
        + "<p>complete: all files of the manifest have their sizes. "
        + "<code>titan ckpt verify</code> compares their content with its hashes.</p>"
    )


def _evals(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return _table(keys, [[_setting(row.get(key)) for key in keys] for row in rows])


def _config(history: History) -> str:
    if not history.run.config:
        return ""
    parts = []
    changed = {key for attempt in history.attempts for key in attempt.changes}
    rows = [
        [f"attempt {attempt.recorded.number}", key, _setting(before), _setting(after)]
        for attempt in history.attempts
        for key, (before, after) in attempt.changes.items()
    ]
    if rows:
        parts.append("<h3>Changes between attempts</h3>")
        parts.append(_table(["from", "setting", "before", "after"], rows))
    sections: dict[str, list[tuple[str, Any]]] = {}
    for key, value in history.run.config.items():
        sections.setdefault(key.partition(".")[0], []).append((key, value))
    for section, settings in sections.items():
        is_open = " open" if any(key in changed for key, _ in settings) else ""
        lines = "".join(
            f'<tr{" class=changed" if key in changed else ""}><th scope="row">{escape(key)}</th>'
            f"<td>{escape(_setting(value))}</td></tr>"
            for key, value in settings
        )
        parts.append(
            f"<details{is_open}><summary>{escape(section)}</summary>"
            f'<div class="scroll"><table>{lines}</table></div></details>'
        )
    return "".join(parts)


def _environment(history: History) -> str:
    parts = []
    newest = next((a.recorded for a in reversed(history.attempts) if a.recorded.environment), None)
    if newest is None:
        return ""
    for name, text in newest.environment.items():
        parts.append(
            f"<details><summary>{escape(name)} of attempt {newest.number}</summary>"
            f'<pre tabindex="0">{escape(text)}</pre></details>'
        )
    return "".join(parts)


# ---- text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; of many rows only the first and last ones, with the number of the others."""
    if not rows:
        return "<p>None.</p>"
    lines = [_row(row) for row in rows[: MAX_ROWS // 2]]
    if len(rows) > MAX_ROWS:
        num_hidden = len(rows) - MAX_ROWS
        lines.append(f'<tr><td colspan="{len(head)}">… {num_hidden:,} more …</td></tr>')
    lines += [_row(row) for row in rows[MAX_ROWS // 2 :][-(MAX_ROWS // 2) :]]
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="scroll"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


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
