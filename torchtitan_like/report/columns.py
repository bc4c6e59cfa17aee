"""Read metrics.jsonl as columns of numbers. A file of several gigabytes fits into memory so."""

from __future__ import annotations

import math
from array import array
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.report.tolerant import Row, RowParser, limited_lines
from torchtitan_like.util.reading import Kind

Floats = NDArray[np.float64]

BLOCK_ROWS = 4096  # that are parsed at once
MAX_STEP = 2**53
INFINITE = ("inf", "-inf")  # texts that `decode` makes numbers
STEP = Kind("a step number", lambda value: type(value) is int and 0 <= value < MAX_STEP)


class Columns:
    """Rows as columns of numbers. A missing or non-numeric value is NaN.

    Nested objects have dotted names: `sources.web.loss`.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._arrays: dict[str, array[float]] = {}

    def append(self, row: Row) -> None:
        """Add a row."""
        self._append(row, "")
        self.num_rows += 1

    def extend(self, columns: dict[str, Floats], num_rows: int) -> None:
        """Add rows as columns, float64 (num_rows,) each. Columns without a value are ignored."""
        for name, values in columns.items():
            if not np.isnan(values).all():
                self._padded(name).frombytes(values.tobytes())
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
    """Return the rows of a file with a `step` as columns, and the problems. No file: no rows.

    pyarrow parses a block of lines at once. A block that it cannot read in full, such as one with
    the text "nan" for a number, is parsed line by line, with equal results.
    """
    parser = RowParser(file.name, ("step",), {"step": STEP})
    columns = Columns()
    try:
        with file.open("rb") as stream:
            lines = limited_lines(stream)
            while block := list(islice(lines, BLOCK_ROWS)):
                parsed = _parse(block)
                if parsed is not None:
                    columns.extend(parsed, len(block))
                    parser.num_lines += len(block)
                    continue
                for line in block:
                    if (row := parser.parse(line)) is not None:
                        columns.append(row)
    except FileNotFoundError:
        return columns, []
    except OSError as error:
        return columns, [*parser.problems(), f"{file.name}: cannot be read: {error.strerror}"]
    return columns, parser.problems()


def _parse(lines: list[bytes]) -> dict[str, Floats] | None:
    """Return the columns of a block; None if it is small, or if a line is no row with a step."""
    if len(lines) < BLOCK_ROWS:
        return None
    import pyarrow as pa
    import pyarrow.compute as pa_compute
    import pyarrow.json as pa_json

    block = b"".join(lines)
    read_options = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    columns: dict[str, Floats] = {}
    try:
        table = pa_json.read_json(pa.BufferReader(block), read_options=read_options)
        while any(pa.types.is_struct(field.type) for field in table.schema):
            table = table.flatten()
        names = table.column_names
        if table.num_rows != len(lines) or "step" not in names or table["step"].null_count:
            return None
        if not pa.types.is_integer(table["step"].type):
            return None
        for name, column in zip(names, table.columns, strict=True):
            if pa.types.is_string(column.type):
                if pa_compute.any(pa_compute.is_in(column, pa.array(INFINITE))).as_py():
                    return None
            elif pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
                columns[name] = column.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    is_step = columns["step"].min() >= 0 and columns["step"].max() < MAX_STEP
    return columns if is_step else None
