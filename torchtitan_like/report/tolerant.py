"""Read JSONL files that may be damaged, torn, huge or still being written.

A line that cannot be used is skipped and reported; all others are kept.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.util.jsonl import decode

MAX_LINE = 2**24  # bytes; a longer line is damage
BLOCK = 2**20  # bytes that are parsed at once
MAX_STEP = 2**53
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
    """Rows as columns of numbers. A missing or non-numeric value is NaN.

    Nested objects have dotted names: `sources.web.loss`. A file of several gigabytes fits into
    memory as columns.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._arrays: dict[str, array[float]] = {}

    def append(self, row: Row) -> None:
        """Add a row."""
        self._append(row, "")
        self.num_rows += 1

    def extend(self, columns: Mapping[str, Floats], num_rows: int) -> None:
        """Add rows as columns, float64 (num_rows,) each. Columns without a value are ignored."""
        for name, values in columns.items():
            if not np.isnan(values).all():
                column = self._padded(name)
                column.frombytes(values.tobytes())
        self.num_rows += num_rows

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
                self._padded(prefix + key).append(_as_float(value))

    def _padded(self, name: str) -> array[float]:
        column = self._arrays.setdefault(name, array("d"))
        column.extend([math.nan] * (self.num_rows - len(column)))
        return column


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan


def read_columns(file: Path) -> tuple[Columns, list[str]]:
    """Return the rows of a file with a `step` as columns, and the problems. No file: no rows."""
    reader = RowReader(file.name)
    try:
        with file.open("rb") as stream:
            for block in _blocks(stream):
                reader.read(block)
    except FileNotFoundError:
        return reader.columns, []
    except OSError as error:
        problem = f"{file.name}: cannot be read: {error.strerror}"
        return reader.columns, [*reader.skipped.problems(), problem]
    return reader.columns, reader.skipped.problems()


class RowReader:
    """Reads consecutive blocks of lines of one file into columns. Each row has a `step`.

    A large block of lines with the same keys is parsed at once, by pyarrow. Any other block is
    parsed line by line. The results are equal.
    """

    def __init__(self, name: str) -> None:
        self.columns = Columns()
        self.skipped = SkippedLines(name)
        self._kinds: Kinds = {}
        self._is_regular = True  # all values so far are numbers, texts or objects of these

    def read(self, block: bytes) -> None:
        """Read lines. The last one is incomplete, or damage, if it has no newline."""
        if not self._read_at_once(block):
            _read_lines(io.BytesIO(block), self.skipped, self._append, _step_problem)

    def _append(self, row: Row) -> None:
        self.columns.append(row)
        self._is_regular = self._is_regular and _learn_kinds(self._kinds, row)

    def _read_at_once(self, block: bytes) -> bool:
        """Read the lines if all of them are rows with known keys; else return False."""
        if len(block) < BLOCK or not self._kinds or not self._is_regular or block[-1:] != b"\n":
            return False
        columns = _parse(block, self._kinds)
        if columns is None:
            return False
        num_rows = len(columns["step"])
        self.columns.extend(columns, num_rows)
        self.skipped.num_lines += num_rows
        return True


Kinds = dict[str, Any]  # key -> float, str, or the kinds of an object


def _learn_kinds(kinds: Kinds, row: Row) -> bool:
    """Add the keys of a row. Return False for a value that is no number, text or object."""
    is_regular = True
    for key, value in row.items():
        if isinstance(value, dict):
            inner = kinds.setdefault(key, {})
            is_regular = is_regular and isinstance(inner, dict) and _learn_kinds(inner, value)
        elif isinstance(value, (float, str)) or type(value) is int:
            kinds.setdefault(key, str if isinstance(value, str) else float)
        else:
            is_regular = False
    return is_regular


def _parse(block: bytes, kinds: Kinds) -> dict[str, Floats] | None:
    """Return the columns of a block of lines; None if a line differs from what is expected."""
    import pyarrow as pa
    import pyarrow.json as pa_json

    fields = pa.schema([*_fields(pa, {**kinds, "step": None})])
    try:
        table = pa_json.read_json(
            pa.BufferReader(block),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa_json.ParseOptions(
                explicit_schema=fields, unexpected_field_behavior="error"
            ),
        )
    except pa.ArrowException:
        return None
    while any(pa.types.is_struct(column.type) for column in table.schema):
        table = table.flatten()
    step = table.column("step")
    if table.num_rows != block.count(b"\n") or step.null_count or not table.num_rows:
        return None
    columns: dict[str, Floats] = {"step": step.to_numpy()}
    if columns["step"].min() < 0 or columns["step"].max() >= MAX_STEP:
        return None
    for column, name in zip(table.columns, table.column_names, strict=True):
        if name == "step" or pa.types.is_floating(column.type):
            columns[name] = column.to_numpy().astype(np.float64, copy=False)
    return columns


def _fields(pa: Any, kinds: Kinds) -> Iterator[Any]:
    """Yield the fields of a pyarrow schema. None: the kind of a step number."""
    types = {None: pa.int64(), float: pa.float64(), str: pa.string()}
    for key, kind in kinds.items():
        is_object = isinstance(kind, dict)
        yield pa.field(key, pa.struct([*_fields(pa, kind)]) if is_object else types[kind])


def read_objects(file: Path, key: str | None = None) -> tuple[list[Row], list[str]]:
    """Return the rows of a file and the problems. No file: no rows. key: each row must have it."""
    rows: list[Row] = []

    def check(row: Row) -> str | None:
        return f"no {key}" if key is not None and key not in row else None

    problems = _read(file, rows.append, check)
    return rows, problems


def _step_problem(row: Row) -> str | None:
    step = row.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP
    return None if is_step else "no step number"


def _read(
    file: Path, keep: Callable[[Row], None], find_problem: Callable[[Row], str | None]
) -> list[str]:
    skipped = SkippedLines(file.name)
    try:
        with file.open("rb") as stream:
            _read_lines(stream, skipped, keep, find_problem)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [*skipped.problems(), f"{file.name}: cannot be read: {error.strerror}"]
    return skipped.problems()


def _read_lines(
    stream: BinaryIO,
    skipped: SkippedLines,
    keep: Callable[[Row], None],
    find_problem: Callable[[Row], str | None],
) -> None:
    for line in _lines(stream):
        skipped.num_lines += 1
        if not line.endswith(b"\n"):
            skipped.add("incomplete" if len(line) < MAX_LINE else "too long")
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


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; at most `MAX_LINE` bytes of each, without a newline if cut."""
    while line := stream.readline(MAX_LINE):
        yield line
        _skip_line(stream, line)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines in blocks of about `BLOCK` bytes. A line of `MAX_LINE` bytes is cut."""
    while block := stream.read(BLOCK):
        if not block.endswith(b"\n"):
            block += stream.readline(MAX_LINE)
            _skip_line(stream, block)
        yield block


def _skip_line(stream: BinaryIO, line: bytes) -> None:
    """Skip what was cut off a line."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(MAX_LINE)
