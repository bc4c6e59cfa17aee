"""Log lines: the root logger, one format, on stdout and, where asked, in a file.

A line reads ``[titan] 2026-03-01 12:00:00,123 - root - INFO - text``, as users' log parsers know it from TorchTitan.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from torchtitan_like.util.credentials import mask_text

LINE_FORMAT = "[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"

logger = logging.getLogger()

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLORS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


class _StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` is at that moment; flushes after each line, so that a pipe shows it at once."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


class _LineFormatter(logging.Formatter):
    """One log line in `LINE_FORMAT`, without credentials."""

    def __init__(self) -> None:
        super().__init__(LINE_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class _PlainFormatter(_LineFormatter):
    """The same line without colour codes, for files."""

    def format(self, record: logging.LogRecord) -> str:
        return _ANSI.sub("", super().format(record))


class _AttemptFileHandler(logging.FileHandler):
    """The one log file of this process; see ``add_file``."""


def init_logger() -> None:
    """Send log lines of level INFO and above to stdout. Calling it again changes nothing."""
    logger.setLevel(logging.INFO)
    # Kineto prints its own lines past the logger; 5 = errors only. A value the user has set stays.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        handler = _StdoutHandler()
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)


def add_file(path: str | os.PathLike[str] | None) -> None:
    """Also append each line to ``path``, whose parent folders are made; None ends that.

    A process has one such file: the previous one is closed.
    """
    for handler in [h for h in logger.handlers if isinstance(h, _AttemptFileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file_handler = _AttemptFileHandler(path, encoding="utf-8")
        file_handler.setFormatter(_PlainFormatter())
        logger.addHandler(file_handler)


def use_colors(disable_color_printing: bool, stream: Any = None) -> bool:
    """Whether to colour the step line: on a terminal, unless ``metrics.disable_color_printing`` or NO_COLOR is set."""
    stream = sys.stdout if stream is None else stream
    return not disable_color_printing and "NO_COLOR" not in os.environ and bool(stream.isatty())


def paint(text: str, color: str, enabled: bool) -> str:
    """``text`` in a terminal ``color`` (red, green, yellow, blue, magenta, cyan), or as it is when not ``enabled``."""
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if enabled else text
