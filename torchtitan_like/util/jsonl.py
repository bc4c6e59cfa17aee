"""Append-only JSONL files: one flat object per line, floats that round-trip, no step twice after a resume."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from torchtitan_like.util.files import AppendOnlyFile, WriteFailures, atomic_file

MOST_UNWRITTEN = 10_000  # rows that wait in memory while the disk is full: about 5 MB

logger = logging.getLogger()


def encode(row: Mapping[str, object]) -> bytes:
    """Return a row as one line of valid JSON. ``repr`` writes floats, so they round-trip bit for bit.

    Non-finite numbers become strings: see `to_json_value`.
    """
    return json.dumps(to_json_value(row), allow_nan=False).encode() + b"\n"


def to_json_value(value: object) -> object:
    """Replace non-finite numbers, which JSON lacks, with ``"nan"``, ``"inf"`` and ``"-inf"``.

    ``float()`` reads these strings.
    """
    if isinstance(value, Mapping):
        return {key: to_json_value(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole rows of a file, ``"nan"``, ``"inf"`` and ``"-inf"`` as floats; [] without a file. A torn last line is none."""
    if not Path(path).exists():
        return []
    return [decode(line) for line in Path(path).read_bytes().split(b"\n")[:-1]]


def decode(line: bytes) -> dict[str, Any]:
    """What `encode` has written. Raises ValueError."""
    try:
        return dict(json.loads(line, object_hook=_in_numbers))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _in_numbers(row: dict[str, Any]) -> dict[str, Any]:
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {key: words.get(v, v) if isinstance(v, str) else v for key, v in row.items()}


class JsonlFile:
    """A file of rows that each have an integer ``step``, opened at the first ``append``. One process writes it.

    Rows that cannot be written are noted in `failures` and wait in memory: each ``append`` tries them again, in order.
    """

    def __init__(self, path: Path, failures: WriteFailures | None = None) -> None:
        self.path = path
        self._file = AppendOnlyFile(path)
        self._failures = WriteFailures() if failures is None else failures
        self._unwritten: list[bytes] = []
        self._num_dropped = 0

    def append(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        """Write the rows and hand them to the operating system: they outlive this process, though not a power cut."""
        self._unwritten += map(encode, rows)
        surplus = max(0, len(self._unwritten) - MOST_UNWRITTEN)
        del self._unwritten[:surplus]
        self._num_dropped += surplus
        if self._unwritten:
            with self._failures.noted(self.path):
                self._file.append(b"".join(self._unwritten))
                self._unwritten.clear()

    @property
    def num_missing(self) -> int:
        """Number of appended rows that are not in the file: those that wait, and those dropped from memory."""
        return len(self._unwritten) + self._num_dropped

    def require_all(self) -> None:
        """Write the rows that wait. Raises OSError if rows are missing after that."""
        self.append()
        if self.num_missing:
            raise OSError(errno.EIO, f"{self.num_missing} rows are missing", str(self.path))

    def sync(self) -> int:
        """The file's size in bytes once all rows are on the disk. Raises OSError if they cannot be written."""
        self.require_all()
        return self._file.sync()

    def byte_offset(self) -> int:
        """As `sync`; 0 where that would raise."""
        with self._failures.noted(self.path):
            return self.sync()
        return 0

    def end(self) -> tuple[int, dict[str, Any]]:
        """The file's size in bytes and its last row, of what `rewind` has left: (0, {}) where there is nothing."""
        size = self.path.stat().st_size if self.path.exists() else 0
        tail = b""
        while len(tail) < size and b"\n" not in tail[:-1]:  # not the whole file: it has a row for each step of months
            with self.path.open("rb") as file:
                file.seek(max(0, size - max(2**16, 2 * len(tail))))
                tail = file.read()
        return size, decode(tail.splitlines()[-1]) if tail else {}

    def rewind(self, step: int, discarded: Path) -> int:
        """Move what lies beyond ``step`` to the end of ``discarded``; returns how many lines moved.

        Raises OSError.

        Lines that are no whole row (a writer killed in mid-line) move too. Killed at any point this loses no line and
        leaves none in ``path`` for ever: what moves is on the disk in ``discarded`` before it leaves ``path``.
        """
        self.close()
        if not self.path.exists():
            return 0
        with self.path.open("rb") as lines:
            goes = [not _stays(line, step) for line in lines]
            if not any(goes):
                return 0
            lines.seek(0)
            with open(discarded, "ab") as moved:
                moved.writelines(compress(lines, goes))
                moved.flush()
                os.fsync(moved.fileno())
            lines.seek(0)
            with atomic_file(self.path) as kept:
                kept.writelines(compress(lines, map(not_, goes)))
        return sum(goes)

    def close(self) -> None:
        """Write what waits, if that is possible now, and close the file. Never raises OSError."""
        self.append()
        with self._failures.noted(self.path):
            self._file.close()
        if self.num_missing:
            logger.error(f"{self.num_missing} rows are missing from {self.path}: they could not be written")


def _stays(line: bytes, step: int) -> bool:
    """Whether ``line`` is a whole row of a step that the loaded state includes."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step
