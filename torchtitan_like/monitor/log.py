"""Configure the root logger: on stdout, and optionally in a file.

A line is ``[titan] 2026-03-01 12:00:00,123 - root - INFO - text``, as in TorchTitan, for log
parsers. A terminal shows ``12:00:00 text`` instead. There, once the process has a log file, only
warnings and lines with `extra=on_screen()` appear: the file has all lines.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from torchtitan_like.util.credentials import mask_text
from torchtitan_like.util.files import AppendOnlyFile, WriteFailures

LINE_FORMAT = "[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"

logger = logging.getLogger()

_COLORS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


class _StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg] # generic from Python 3.11
    """Writes to the current ``sys.stdout``, and flushes each line for readers of a pipe.

    hides_details: True on a terminal once a log file has all lines.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.is_terminal = sys.stdout.isatty()
        self.hides_details = False
        self.setFormatter(_ScreenFormatter() if self.is_terminal else _LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        is_shown = record.levelno >= logging.WARNING or hasattr(record, "screen_text")
        if is_shown or not self.hides_details:
            super().emit(record)

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line if stdout is closed or its disk is full: logging must not end the run."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LineFormatter(logging.Formatter):
    """Formats log lines in `LINE_FORMAT`, with masked credentials."""

    def __init__(self) -> None:
        super().__init__(LINE_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class _ScreenFormatter(logging.Formatter):
    """Formats log lines for a terminal: the time, the level of a warning, the text to show."""

    def format(self, record: logging.LogRecord) -> str:
        text = getattr(record, "screen_text", "") or super().format(record)
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return mask_text(f"{self.formatTime(record, '%H:%M:%S')} {level}{text}")


class _AttemptFileHandler(logging.Handler):
    """The log file of this process (see ``add_file``). Records and counts lines that fail."""

    def __init__(self, path: Path, failures: WriteFailures) -> None:
        super().__init__()
        self._file = AppendOnlyFile(path)
        self._failures = failures
        self._num_lost = 0
        with failures.recording(path):
            self._file.append(b"")  # create the file, even without a log line

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n"
        if self._num_lost:
            line = f"({self._num_lost} lines are missing: they could not be written)\n{line}"
        try:
            self._file.append(line.encode(errors="backslashreplace"))
            self._num_lost = 0
        except OSError as error:
            self._num_lost += 1
            self._failures.record(self._file.path, error)

    def close(self) -> None:
        with self._failures.recording(self._file.path):
            self._file.close()
        super().close()


def init_logger() -> None:
    """Send log lines of level INFO and above to stdout. Calling it again changes nothing."""
    logger.setLevel(logging.INFO)
    # Kineto prints lines without the logger; 5 = errors only. A value that the user has set is
    # kept.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        logger.addHandler(_StdoutHandler())


def add_file(path: str | os.PathLike[str] | None, failures: WriteFailures | None = None) -> None:
    """Also append each log line to ``path``, and create its parent folders. None: stop it.

    A process has one such file: the previous one is closed. `failures` records failed writes.
    """
    for handler in [h for h in logger.handlers if isinstance(h, _AttemptFileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    if path is not None:
        failures = WriteFailures() if failures is None else failures
        file_handler = _AttemptFileHandler(Path(path), failures)
        file_handler.setFormatter(_LineFormatter())
        logger.addHandler(file_handler)
        for stdout in logger.handlers:
            if isinstance(stdout, _StdoutHandler):
                stdout.hides_details = stdout.is_terminal


def use_colors(disable_color_printing: bool, stream: Any = None) -> bool:
    """Return True if the step line is colored.

    It is colored on a terminal, unless ``metrics.disable_color_printing`` or NO_COLOR is set.
    """
    stream = sys.stdout if stream is None else stream
    return not disable_color_printing and "NO_COLOR" not in os.environ and bool(stream.isatty())


def paint(text: str, color: str, enabled: bool) -> str:
    """Return ``text`` in a terminal ``color`` of `_COLORS`; unchanged if not ``enabled``."""
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if enabled else text
