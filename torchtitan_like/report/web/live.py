"""Follow one run: its page, and what has changed since a browser got it."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan_like.report.curves import (
    SMOOTHED_LOSS,
    VALIDATION_KEY,
    Chart,
    EventMarks,
    build_charts,
    build_marks,
)
from torchtitan_like.report.decimation import trailing_mean
from torchtitan_like.report.figures import draw
from torchtitan_like.report.history import build_history
from torchtitan_like.report.page import (
    Section,
    chart_caption,
    curves_sections,
    detail_sections,
    script,
    section_links,
    sections_html,
    summary_sections,
)
from torchtitan_like.report.recorded import EVAL, read_run
from torchtitan_like.report.summary import smoothing_window
from torchtitan_like.report.tolerant import Columns, Floats, Row, Table, parse_rows
from torchtitan_like.report.web.boundary import Boundary
from torchtitan_like.report.web.index import StoredTable, read_index, update_index
from torchtitan_like.report.web.indexer import Indexer
from torchtitan_like.report.web.pages import live_document, run_header, status_line
from torchtitan_like.report.web.status import StatusReader
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    CONFIG,
    ERRORS,
    EVENTS,
    EXIT,
    METRICS,
    VALIDATION,
    newest_attempt,
)

NO_FILE = (0, 0)  # identity of a file that does not exist
MAX_WAITED_BYTES = 2**25  # of rows without an index that a request waits for
MAX_NEW_ROWS = 2000  # after which the page is computed anew
MAX_READ = 2**24  # bytes of new rows at once
# The page is computed anew at most after this many seconds, and this many times what it took.
MIN_PAUSE = 1.0
PAUSE_FACTOR = 10.0


class Message(NamedTuple):
    """A server-sent event. id: what the browser sends to continue after it; "": none."""

    event: str
    data: dict[str, Any]
    id: str = ""

    def encode(self) -> bytes:
        """Return the lines of the event. JSON has no line breaks."""
        head = f"id: {self.id}\n" if self.id else ""
        return f"{head}event: {self.event}\ndata: {json.dumps(self.data)}\n\n".encode()


class Position(NamedTuple):
    """What a browser shows: a page, and how many batches of new points."""

    version: str
    num_batches: int

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse the id of a message. Any other text is the position of no page."""
        version, _, number = text.partition(".")
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        return cls(version, int(number)) if is_number else cls("", 0)

    def __str__(self) -> str:
        return f"{self.version}.{self.num_batches}"


@dataclass
class View:
    """What a page shows, computed from all rows of the run.

    signature: names the charts, curves and kinds of events. Pages with equal ones have equal
    figures. origin: start of the run in Unix time. identity: device and inode of the file of rows.
    offset: bytes of it that were read. losses: float64, the last finite ones before `offset`, with
    which the smoothed loss continues. batches: points of later rows, by curve.
    """

    version: str
    signature: str
    summary: list[Section]
    details: list[Section]
    charts: list[Chart]
    marks: list[EventMarks]
    origin: float
    identity: tuple[int, int]
    offset: int
    window: int
    losses: Floats
    batches: list[dict[str, dict[str, list[float]]]] = field(default_factory=list)
    num_new_rows: int = 0


class LiveRun:
    """A run that is being watched. Threads may share it."""

    def __init__(self, name: str, run: Path, boundary: Boundary, indexer: Indexer) -> None:
        self.name = name
        self.run = run
        self.status = StatusReader(run, boundary)
        self._boundary = boundary
        self._indexer = indexer
        self._lock = threading.Lock()
        self._versions = count()
        self._prefix = secrets.token_hex(4)
        self._view: View | None = None
        self._problem = ""
        self._files: tuple[object, ...] = ()
        self._next_build = 0.0

    # ---- pages

    def page(self, now: float) -> str:
        """Return the page. While the run is not indexed yet, it has no curves. now: Unix time."""
        with self._lock:
            self._follow(now)
            view, problem = self._view, self._problem
            header = run_header(self.name, self._status_line(now))
        if view is None:
            note = problem or "The curves appear as soon as the rows are indexed."
            main = f'<p id="note">{escape(note)}</p>'
            return live_document(self.name, header, main, "", {"id": "", "signature": ""})
        drawing = draw(view.charts, view.marks, shows_events=True)
        curves = curves_sections(view.charts, view.marks, drawing.charts, True)
        sections = [*view.summary, *curves, *view.details]
        # The figures have the points up to the view. The batches follow.
        shown = Position(view.version, 0)
        return live_document(
            self.name,
            header + section_links(sections),
            sections_html(sections),
            f"{drawing.scripts}{script('page.js')}",
            {"id": str(shown), "signature": view.signature},
        )

    def update(self) -> str:
        """Return what differs in a page of another version with the same signature, as JSON.

        Raises ValueError if there is none, as before the rows are indexed.
        """
        with self._lock:
            view = self._view
            if view is None:
                raise ValueError(f"{self.name} is not indexed. Expected its rows. Try again later.")
            return json.dumps(
                {
                    "version": view.version,
                    "signature": view.signature,
                    "sections": [one._asdict() for one in (*view.summary, *view.details)],
                    "captions": [chart_caption(chart) for chart in view.charts],
                    "sources": {**_curve_data(view.charts), **_event_data(view.marks)},
                }
            )

    # ---- changes

    def messages(self, shown: Position, now: float) -> tuple[list[Message], Position]:
        """Return the messages for a browser, and what it shows after them. now: Unix time."""
        with self._lock:
            self._follow(now)
            messages = [Message("state", {"html": self._status_line(now)})]
            view = self._view
            if view is None:
                return messages, shown
            if shown.version != view.version or shown.num_batches > len(view.batches):
                shown = Position(view.version, 0)
                messages.append(
                    Message(
                        "page", {"version": view.version, "signature": view.signature}, str(shown)
                    )
                )
            for points in view.batches[shown.num_batches :]:
                shown = Position(view.version, shown.num_batches + 1)
                messages.append(
                    Message("rows", {"version": view.version, "points": points}, str(shown))
                )
            return messages, shown

    def _status_line(self, now: float) -> str:
        progress = self._indexer.progress(self.run / METRICS)
        return status_line(self.status.read(now), progress, now)

    def _follow(self, now: float) -> None:
        """Read new rows. Compute the view if there is none, or if it has aged."""
        try:
            self._boundary.require(self.run / METRICS)
            is_replaced = self._view is not None and not self._read_new_rows(self._view)
            is_due = (
                self._view is None
                or is_replaced
                or self._view.num_new_rows > MAX_NEW_ROWS
                or self._files != self._watched_files()
            )
            if is_due and now >= self._next_build:
                self._build(now)
        except (OSError, ValueError) as error:
            self._problem = str(error)
            self._next_build = now + MIN_PAUSE

    def _build(self, now: float) -> None:
        start = time.monotonic()
        self._boundary.require_run(self.run)
        files = self._watched_files()
        identity, table = self._read_metrics()
        if table is None:
            return
        recorded = read_run(self.run, lambda file: (table, _problems(table, file)))
        recorded.name = self.name
        history = build_history(recorded)
        charts, marks = build_charts([history]), build_marks(history)
        window = smoothing_window(table.num_rows)
        self._view = View(
            version=f"{self._prefix}-{next(self._versions)}",
            signature=_signature(charts, marks),
            summary=summary_sections([history]),
            details=detail_sections([history]),
            charts=charts,
            marks=marks,
            origin=history.origin,
            window=window,
            losses=_last_finite(table.get("loss"), window),
            identity=identity,
            offset=table.offset if isinstance(table, StoredTable) else 0,
        )
        self._problem = ""
        self._files = files
        self._next_build = now + max(MIN_PAUSE, PAUSE_FACTOR * (time.monotonic() - start))

    def _read_metrics(self) -> tuple[tuple[int, int], Table | None]:
        """Return the identity of the file and all rows; None while a long file is being indexed."""
        file = self.run / METRICS
        try:
            stats = file.stat()
        except FileNotFoundError:
            return NO_FILE, Columns()
        identity = (stats.st_dev, stats.st_ino)
        index = read_index(file, self._indexer.cache)
        indexed = 0 if index is None else index.offset
        if stats.st_size - indexed > MAX_WAITED_BYTES:
            if self._indexer.progress(file) is None:
                self._indexer.request(file, is_urgent=True)
            self._problem = self._indexer.problem(file)
            return identity, None
        return identity, update_index(file, self._indexer.cache)

    def _read_new_rows(self, view: View) -> bool:
        """Add the points of new rows to the view. Return False if the file was replaced."""
        try:
            with (self.run / METRICS).open("rb") as stream:
                stats = os.fstat(stream.fileno())
                identity = (stats.st_dev, stats.st_ino)
                if identity != view.identity or stats.st_size < view.offset:
                    return False
                stream.seek(view.offset)
                content = stream.read(MAX_READ)
        except FileNotFoundError:
            return view.identity == NO_FILE
        content = content[: content.rfind(b"\n") + 1]
        rows = parse_rows(content)
        view.offset += len(content)
        if rows:
            view.batches.append(_points(view, rows))
            view.num_new_rows += len(rows)
        return True

    def _watched_files(self) -> tuple[object, ...]:
        """Return what changes when a section of the page does, except for new rows."""
        paths = [self.run / name for name in (CONFIG, EVENTS, VALIDATION, EVAL, EXIT, ATTEMPTS)]
        attempt = newest_attempt(self.run)
        if attempt is not None:
            paths.append(attempt / ERRORS)
        identities: list[object] = []
        for path in paths:
            with suppress(OSError):
                stats = path.stat()
                identities.append((path, stats.st_ino, stats.st_size, stats.st_mtime_ns))
        return tuple(identities)


def _problems(table: Table, file: Path) -> list[str]:
    return table.problems(file.name) if isinstance(table, StoredTable) else []


def _signature(charts: Sequence[Chart], marks: Sequence[EventMarks]) -> str:
    names = [[chart.title, *(curve.key for curve in chart.curves)] for chart in charts]
    return json.dumps([names, [mark.kind for mark in marks]])


def _points(view: View, rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return the points of new rows for each curve with values, by its tag in `figures`."""
    table = Columns()
    for row in rows:
        table.append(row)
    losses = np.concatenate([view.losses, table.get("loss")])
    smoothed = trailing_mean(losses, view.window)[len(view.losses) :]
    view.losses = _last_finite(losses, view.window)
    hours = (table.get("time") - view.origin) / 3600
    points = {}
    for number, chart in enumerate(view.charts):
        for curve in chart.curves:
            if curve.key.startswith(VALIDATION_KEY):
                continue
            values = smoothed if curve.key == SMOOTHED_LOSS else table.get(curve.key)
            kept = np.isfinite(values)
            if kept.any():
                points[f"{number}/{curve.key}"] = _as_lists(
                    step=table.get("step")[kept],
                    tokens=table.get("n_tokens_seen")[kept],
                    hours=hours[kept],
                    value=values[kept],
                )
    return points


def _last_finite(values: Floats, num: int) -> Floats:
    """Return the last `num` finite values."""
    finite: Floats = values[np.isfinite(values)][-num:]
    return finite


def _curve_data(charts: Sequence[Chart]) -> dict[str, dict[str, Any]]:
    return {
        f"{number}/{curve.key}": {
            "name": curve.label,
            "data": _as_lists(
                step=curve.step, tokens=curve.tokens, hours=curve.hours, value=curve.values
            ),
        }
        for number, chart in enumerate(charts)
        for curve in chart.curves
    }


def _event_data(marks: Sequence[EventMarks]) -> dict[str, dict[str, Any]]:
    return {
        f"event/{mark.kind}": {
            "name": mark.run,
            "data": {
                **_as_lists(step=mark.step, tokens=mark.tokens, hours=mark.hours),
                "detail": mark.details,
            },
        }
        for mark in marks
    }


def _as_lists(**columns: Floats) -> dict[str, list[float]]:
    """Return columns as lists for JSON, in which a missing number is 0."""
    return {name: np.nan_to_num(values).tolist() for name, values in columns.items()}
