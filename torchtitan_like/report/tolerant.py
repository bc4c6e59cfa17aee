"""Read JSONL files that may be damaged, torn, huge or still being written.

A line that cannot be used is skipped and reported; all others are kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.util.jsonl import decode

MAX_LINE = 2**24  # bytes; a longer line is damage
MAX_LISTED = 5  # line numbers in a problem

Row = dict[str, Any]
Floats = NDArray[np.float64]


@dataclass
class SkippedLines:
    """The lines of one file that could not be used, by reason."""

    name: str
    num_lines: int = 0
    by_reason: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """Record that the newest line was skipped."""
        self.by_reason.setdefault(reason, []).append(self.num_lines)

    def problems(self) -> list[str]:
        """Return one sentence for each reason."""
        return [
            f"{self.name}: skipped {len(numbers):,} of {self.num_lines:,} lines ({reason}): line "
            + ", ".join(map(str, numbers[:MAX_LISTED]))
            + (" ..." if len(numbers) > MAX_LISTED else "")
            for reason, numbers in self.by_reason.items()
        ]


class Columns:
    """Rows as columns of numbers, so that a file of several gigabytes fits into memory.

    A missing or non-numeric value is NaN. Nested objects have dotted names: `sources.web.loss`.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._arrays: dict[str, array[float]] = {}

    def append(self, row: Row) -> None:
        """Add a row."""
        self._append(row, "")
        self.num_rows += 1

    def names(self) -> list[str]:
        """Return the names of all columns, in the order of their first value."""
        return list(self._arrays)

    def get(self, name: str) -> Floats:
        """Return a column, float64 (rows,)."""
        values = np.full(self.num_rows, math.nan)
        stored = self._arrays.get(name, array("d"))
        values[: len(stored)] = stored
        return values

    def _append(self, row: Row, prefix: str) -> None:
        for key, value in row.items():
            if isinstance(value, dict):
                self._append(value, f"{prefix}{key}.")
            elif isinstance(value, (int, float)):
                column = self._arrays.setdefault(prefix + key, array("d"))
                column.extend([math.nan] * (self.num_rows - len(column)))
                column.append(_as_float(value))


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan


def read_columns(file: Path) -> tuple[Columns, list[str]]:
    """Return the rows of a file with a `step` as columns, and the problems. No file: no rows."""
    columns = Columns()
    problems = _read(file, columns.append, _step_problem)
    return columns, problems


def read_objects(file: Path, key: str | None = None) -> tuple[list[Row], list[str]]:
    """Return the rows of a file and the problems. No file: no rows. key: each row must have it."""
    rows: list[Row] = []

    def check(row: Row) -> str | None:
        return f"no {key}" if key is not None and key not in row else None

    problems = _read(file, rows.append, check)
    return rows, problems


def _step_problem(row: Row) -> str | None:
    step = row.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53
    return None if is_step else "no step number"


def _read(
    file: Path, keep: Callable[[Row], None], find_problem: Callable[[Row], str | None]
) -> list[str]:
    skipped = SkippedLines(file.name)
    try:
        for line in _lines(file):
            skipped.num_lines += 1
            if not line.endswith(b"\n"):
                reason = "incomplete" if len(line) < MAX_LINE else "too long"
                skipped.add(reason)
                continue
            if not line.strip():
                continue
            try:
                row = decode(line)
            except (TypeError, ValueError):
                skipped.add("not a JSON object")
                continue
            problem = find_problem(row)
            if problem is not None:
                skipped.add(problem)
                continue
            keep(row)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [*skipped.problems(), f"{file.name}: cannot be read: {error.strerror}"]
    return skipped.problems()


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file; at most `MAX_LINE` bytes of each, without a newline if cut."""
    with file.open("rb") as stream:
        while line := stream.readline(MAX_LINE):
            yield line
            while not line.endswith(b"\n") and line:
                line = stream.readline(MAX_LINE)
