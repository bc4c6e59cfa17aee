"""HTML of the list of runs and of the parts that only live pages have."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchtitan_like.report.page import NONE, html_document
from torchtitan_like.report.status import format_clock
from torchtitan_like.report.web.status import RunStatus

ASSETS = Path(__file__).parent / "assets"
SPARK_SIZE = (120, 28)  # units of the picture, which are pixels
COLUMNS = (
    "run",
    "state",
    "step",
    "loss",
    "tokens/s and device",
    "MFU",
    "time left",
    "newest row",
)
SWITCHES = {
    "save": "Save a checkpoint",
    "export": "Export to Hugging Face",
    "stop": "Save and stop",
}


def run_path(name: str) -> str:
    """Return the path of a run in the URLs of its pages, after their first part."""
    return quote(os.fsencode(name), safe="")


def live_document(title: str, header: str, main: str, scripts: str, data: Mapping[str, Any]) -> str:
    """Return a page that follows the server. data: for live.js."""
    return html_document(
        title,
        header,
        main,
        scripts=f"{scripts}<script>{_asset('live.js')}</script>",
        styles=_asset("web.css"),
        sources="'self'",
        data=json.dumps({"path": run_path(title), **data}),
    )


def run_header(name: str, status: str) -> str:
    """Return the header of a run's page. status: see `status_line`."""
    buttons = "".join(
        f'<button type="button" data-switch="{action}">{label}</button>'
        for action, label in SWITCHES.items()
    )
    return (
        f'<p><a href="/">All runs</a></p><h1>{escape(name)}</h1><div id="status">{status}</div>'
        f'<div class="switches">{buttons}<output id="answer" aria-live="polite"></output></div>'
        '<p id="connection" role="alert" hidden>The server does not answer. Trying again …</p>'
    )


def status_line(status: RunStatus, progress: float | None, now: float) -> str:
    """Return the newest numbers of a run. progress: of its index, or None. now: Unix time."""
    parts = [
        _badge(status),
        f"step {_steps(status)}" if status.step is not None else "",
        f"loss {status.loss:.4f}" if status.loss is not None else "",
        f"{status.tps:,.0f} tokens/s and device" if status.tps is not None else "",
        f"MFU {status.mfu:.1f} %" if status.mfu is not None else "",
        f"{format_clock(status.seconds_left)} left" if status.seconds_left is not None else "",
        f"newest row {_age(status, now)}" if status.updated is not None else "",
        _progress(progress),
    ]
    return " · ".join(part for part in parts if part)


def index_document(folder: Path, rows: Mapping[str, str], note: str) -> str:
    """Return the list of runs. rows: see `index_row`. note: a sentence below the list, or ""."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(rows.values())
    return html_document(
        str(folder),
        f"<h1>Runs in {escape(str(folder))}</h1>"
        '<p id="connection" role="alert" hidden>The server does not answer. Trying again …</p>',
        f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"<p>{escape(note)}</p>",
        scripts=f"<script>{_asset('index.js')}</script>",
        styles=_asset("web.css"),
        sources="'self'",
    )


def index_row(
    name: str,
    status: RunStatus,
    sparkline: Sequence[tuple[float, float]],
    progress: float | None,
    now: float,
) -> str:
    """Return the row of a run. sparkline: step and loss of some rows. now: Unix time."""
    cells = (
        f'<a href="/run/{run_path(name)}">{escape(name)}</a>',
        f"{_badge(status)} {_progress(progress)}",
        _steps(status),
        f"{NONE if status.loss is None else f'{status.loss:.4f}'} {_sparkline(sparkline)}",
        NONE if status.tps is None else f"{status.tps:,.0f}",
        NONE if status.mfu is None else f"{status.mfu:.1f} %",
        NONE if status.seconds_left is None else format_clock(status.seconds_left),
        _age(status, now),
    )
    html = "".join(
        f'<td data-label="{label}">{cell}</td>' for label, cell in zip(COLUMNS, cells, strict=True)
    )
    return f'<tr data-run="{escape(name)}">{html}</tr>'


def _badge(status: RunStatus) -> str:
    detail = f" {escape(status.detail)}" if status.detail else ""
    return f'<strong class="state {status.state}">{status.state}</strong>{detail}'


def _steps(status: RunStatus) -> str:
    if status.step is None:
        return NONE
    if not status.total_steps:
        return f"{status.step:,}"
    percent = 100 * status.step / status.total_steps
    return f"{status.step:,} of {status.total_steps:,} ({percent:.0f} %)"


def _age(status: RunStatus, now: float) -> str:
    """Return the age of the newest row. Clocks differ: no age is below 0."""
    return NONE if status.updated is None else f"{format_clock(max(0.0, now - status.updated))} ago"


def _progress(progress: float | None) -> str:
    if progress is None:
        return ""
    percent = f"{100 * progress:.0f} %"
    return f'<span>indexing <progress value="{progress:.3f}">{percent}</progress> {percent}</span>'


def _sparkline(points: Sequence[tuple[float, float]]) -> str:
    """Return a picture of a curve; "" for fewer than two points."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    width, height = SPARK_SIZE
    (first, start), (last, end) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    line = " ".join(
        f"{width * (x - first) / max(1.0, last - first):.1f},"
        f"{1 + (height - 2) * (high - y) / ((high - low) or 1.0):.1f}"
        for x, y in points
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="loss {start:.4g} to {end:.4g}"><polyline points="{line}"/></svg>'
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
