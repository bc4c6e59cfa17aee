"""Build the indexes of long files in one thread, while pages show the progress."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from torchtitan_like.report.web.index import update_index
from torchtitan_like.util.os_errors import describe_os_error


class Indexer:
    """Updates the indexes of requested files, one after the other."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._queue: deque[Path] = deque()
        self._progress: dict[Path, float] = {}
        self._problems: dict[Path, str] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def request(self, file: Path, *, is_urgent: bool = False) -> None:
        """Update the index of a file soon; an urgent one before the others."""
        with self._changed:
            if is_urgent and file in self._queue:
                self._queue.remove(file)
            if file not in self._queue:
                self._queue.insert(0 if is_urgent else len(self._queue), file)
                self._changed.notify_all()

    def progress(self, file: Path) -> float | None:
        """Return the fraction of a file in its index while it waits or is read; else None."""
        with self._changed:
            waiting = 0.0 if file in self._queue else None
            return self._progress.get(file, waiting)

    def problem(self, file: Path) -> str:
        """Return why the last update of a file failed; "" after a success."""
        with self._changed:
            return self._problems.get(file, "")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                file = self._queue.popleft()
                self._progress[file] = 0.0
            problem = self._update(file)
            with self._changed:
                del self._progress[file]
                self._problems[file] = problem

    def _update(self, file: Path) -> str:
        """Update an index. Return the problem, or ""."""

        def on_progress(done: int, size: int) -> None:
            with self._changed:
                self._progress[file] = done / max(1, size)

        try:
            update_index(file, self.cache, on_progress)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"The index cannot be written: {describe_os_error(error)}"
        return ""
