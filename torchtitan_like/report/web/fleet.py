"""The runs in a folder, for the list of runs and for Prometheus."""

from __future__ import annotations

import threading
from pathlib import Path

from torchtitan_like.report.runs import search_runs
from torchtitan_like.report.web.boundary import Boundary
from torchtitan_like.report.web.index import StoredTable, read_index
from torchtitan_like.report.web.indexer import Indexer
from torchtitan_like.report.web.live import LiveRun
from torchtitan_like.report.web.pages import index_row
from torchtitan_like.report.web.status import RunStatus
from torchtitan_like.util.run_directory import METRICS

SEARCH_SECONDS = 10.0  # between two searches for runs
ROW_SECONDS = 1.0  # between two readings of all runs
INDEX_SECONDS = 60.0  # between two updates of the indexes


class Fleet:
    """The runs at and below a folder. Threads may share it."""

    def __init__(self, boundary: Boundary, indexer: Indexer) -> None:
        self.boundary = boundary
        self._indexer = indexer
        self._lock = threading.Lock()
        self._runs: dict[str, LiveRun] = {}
        self._num_outside = 0
        self._statuses: dict[str, RunStatus] = {}
        self._sparklines: dict[str, tuple[object, list[tuple[float, float]]]] = {}
        self._next_search = 0.0
        self._next_reading = 0.0
        self._next_index = 0.0

    def runs(self, now: float) -> dict[str, LiveRun]:
        """Return the runs by name, which is the path below the folder. now: Unix time."""
        with self._lock:
            self._search(now)
            return dict(self._runs)

    def statuses(self, now: float) -> dict[str, RunStatus]:
        """Return the status of each run, at most `ROW_SECONDS` old."""
        with self._lock:
            self._search(now)
            if now >= self._next_reading:
                self._statuses = {name: run.status.read(now) for name, run in self._runs.items()}
                self._next_reading = now + ROW_SECONDS
            return dict(self._statuses)

    def rows(self, now: float) -> dict[str, str]:
        """Return the row of each run in the list. Requests the indexes that its curves need."""
        statuses = self.statuses(now)
        with self._lock:
            is_due = now >= self._next_index
            if is_due:
                self._next_index = now + INDEX_SECONDS
            return {
                name: self._row(name, self._runs[name], statuses[name], now, is_due)
                for name in statuses
                if name in self._runs
            }

    def note(self) -> str:
        """Return a sentence about runs that are not shown; "" without any."""
        with self._lock:
            if not self._num_outside:
                return ""
            return (
                f"Not shown: {self._num_outside:,} runs that links outside of the folder lead to."
            )

    def _search(self, now: float) -> None:
        if now < self._next_search:
            return
        self._next_search = now + SEARCH_SECONDS
        found = {}
        self._num_outside = 0
        for run in search_runs(self.boundary.root):
            if not run.resolve().is_relative_to(self.boundary.root):
                self._num_outside += 1
                continue
            name = run.relative_to(self.boundary.root).as_posix()
            if name == ".":
                name = self.boundary.root.name or "/"
            found[name] = self._runs.get(name) or LiveRun(name, run, self.boundary, self._indexer)
        if found.keys() != self._runs.keys():
            self._next_reading = 0.0
        self._runs = found

    def _row(self, name: str, run: LiveRun, status: RunStatus, now: float, is_due: bool) -> str:
        file = run.run / METRICS
        try:
            self.boundary.require(file)
            stats = file.stat()
        except (OSError, ValueError):
            return index_row(name, status, [], None, now)
        identity = (stats.st_dev, stats.st_ino, stats.st_size)
        cached, points = self._sparklines.get(name, (None, []))
        if cached != identity:
            index = self._read_index(file)
            points = [] if index is None else list(index.sparkline)
            if index is not None and index.offset == stats.st_size:
                self._sparklines[name] = (identity, points)
            elif is_due:
                self._indexer.request(file)
        if points and status.loss is not None and status.step is not None:
            points = [*points, (float(status.step), status.loss)]
        return index_row(name, status, points, self._indexer.progress(file), now)

    def _read_index(self, file: Path) -> StoredTable | None:
        try:
            return read_index(file, self._indexer.cache)
        except OSError:
            return None
