"""Append-only JSONL files: one object per line, exact floats, no duplicate steps after a resume."""

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

MAX_UNWRITTEN = 10_000  # rows kept in memory while the disk is full: about 5 MB

logger = logging.getLogger()


def encode(row: Mapping[str, object]) -> bytes:
    """Return a row as one line of valid JSON. Floats round-trip bit for bit.

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
    """Return the complete rows of a file; [] without a file. ``"nan"`` and ``"inf"`` become floats.

    An incomplete last line is ignored.
    """
    if not Path(path).exists():
        return []
    return [decode(line) for line in Path(path).read_bytes().split(b"\n")[:-1]]


def decode(line: bytes) -> dict[str, Any]:
    """Return the row of a line that `encode` has written. Raises ValueError."""
    try:
        return dict(json.loads(line, object_hook=_to_floats))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _to_floats(row: dict[str, Any]) -> dict[str, Any]:
    floats = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {key: floats.get(v, v) if isinstance(v, str) else v for key, v in row.items()}


class JsonlFile:
    """A file of rows with an integer ``step``, opened at the first ``append``, for one writer.

    Failed writes are recorded in `failures`. Their rows remain in memory, and each ``append`` tries
    to write them again, in order.
    """

    def __init__(self, path: Path, failures: WriteFailures | None = None) -> None:
        self.path = path
        self._file = AppendOnlyFile(path)
        self._failures = WriteFailures() if failures is None else failures
        self._unwritten: list[bytes] = []
        self._num_dropped = 0

    def append(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        """Write the rows. They survive the end of this process, but not a power failure."""
        self._unwritten += map(encode, rows)
        num_surplus = max(0, len(self._unwritten) - MAX_UNWRITTEN)
        del self._unwritten[:num_surplus]
        self._num_dropped += num_surplus
        if self._unwritten:
            with self._failures.recording(self.path):
                self._file.append(b"".join(self._unwritten))
                self._unwritten.clear()

    @property
    def num_missing(self) -> int:
        """Number of appended rows that are not in the file: unwritten or dropped from memory."""
        return len(self._unwritten) + self._num_dropped

    def require_all(self) -> None:
        """Write the unwritten rows. Raises OSError if rows are missing afterwards."""
        self.append()
        if self.num_missing:
            raise OSError(errno.EIO, f"{self.num_missing} rows are missing", str(self.path))

    def sync(self) -> int:
        """Write all rows to disk. Return the file's size in bytes. Raises OSError."""
        self.require_all()
        return self._file.sync()

    def byte_offset(self) -> int:
        """Return the result of `sync`, or 0 if it fails."""
        with self._failures.recording(self.path):
            return self.sync()
        return 0

    def size_and_last_row(self) -> tuple[int, dict[str, Any]]:
        """Return the size in bytes and the last row, after `rewind`; (0, {}) for an empty file."""
        size = self.path.stat().st_size if self.path.exists() else 0
        tail = b""
        # Read only the end: a file may have rows for months of steps.
        while len(tail) < size and b"\n" not in tail[:-1]:
            with self.path.open("rb") as file:
                file.seek(max(0, size - max(2**16, 2 * len(tail))))
                tail = file.read()
        return size, decode(tail.splitlines()[-1]) if tail else {}

    def rewind(self, step: int, discarded: Path) -> int:
        """Move the rows after ``step`` to the end of ``discarded``. Return their number.

        Incomplete rows, of a writer that was killed, are moved too. A kill at any point loses no
        line: moved lines are on disk in ``discarded`` before they are removed from ``path``. Raises
        OSError.
        """
        self.close()
        if not self.path.exists():
            return 0
        with self.path.open("rb") as lines:
            is_moved = [not _is_kept(line, step) for line in lines]
            if not any(is_moved):
                return 0
            lines.seek(0)
            with open(discarded, "ab") as moved:
                moved.writelines(compress(lines, is_moved))
                moved.flush()
                os.fsync(moved.fileno())
            lines.seek(0)
            with atomic_file(self.path) as kept:
                kept.writelines(compress(lines, map(not_, is_moved)))
        return sum(is_moved)

    def close(self) -> None:
        """Try to write the unwritten rows, and close the file. Never raises OSError."""
        self.append()
        with self._failures.recording(self.path):
            self._file.close()
        if self.num_missing:
            logger.error(f"Could not write {self.num_missing} rows of {self.path}")


def _is_kept(line: bytes, step: int) -> bool:
    """Return True if ``line`` is a complete row of ``step`` or an earlier one."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    if not line.endswith(b"\n") or not isinstance(row, dict):
        return False
    return isinstance(row.get("step"), int) and bool(row["step"] <= step)
