"""The reader of long files in whole blocks of lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.run_folder import Row, step_row, write_rows
from torchtitan_like.report import columns
from torchtitan_like.report.columns import Columns, read_columns


def rows_of(steps: range) -> list[Row]:
    """Rows of several kinds: with and without tps, with nested values, NaN, and a late column."""
    rows = [step_row(n, 1000.0 + n, data_digest=f"{n:x}", loss=math.pi / n) for n in steps]
    for row in rows:
        n = row["step"]
        row |= {"tps": n * 1.5} if n % 10 == 0 else {}
        row |= {"sources": {"web": {"loss": n / 3}}} if n % 3 == 0 else {}
        row |= {"late": n} if n > 150 else {}
        row |= {"loss": "nan"} if n == 77 else {}
    return rows


def lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def assert_equal_tables(a: Columns, b: Columns) -> None:
    assert a.num_rows == b.num_rows and sorted(a.names()) == sorted(b.names())
    for name in a.names():
        np.testing.assert_array_equal(a.get(name), b.get(name), err_msg=name)


DAMAGE = {
    "none": b"",
    "half a line": b'{"step": 3, "lo\n',
    "no object": b"[1]\n",
    "no step": b'{"loss": 2.0}\n',
    "fractional step": b'{"step": 2.0}\n',
    "negative step": b'{"step": -1}\n',
    "large step": b'{"step": 9007199254740993}\n',
    "step is true": b'{"step": true}\n',
    "empty lines": b"\n \n",
    "two objects in a line": b'{"step": 5}{"step": 6}\n',
    "an object in two lines": b'{"step":\n5}\n',
    "text for a number": b'{"step": 5, "loss": "high"}\n',
    "number for an object": b'{"step": 5, "sources": 3}\n',
    "object for a number": b'{"step": 5, "loss": {"a": 1.0}}\n',
    "list": b'{"step": 5, "list": [1, 2]}\n',
    "true": b'{"step": 5, "flag": true}\n',
    "null": b'{"step": 5, "loss": null}\n',
    "infinite": b'{"step": 5, "loss": "-inf", "grad_norm": Infinity}\n',
    "huge integer": b'{"step": 5, "loss": 1' + b"0" * 400 + b"}\n",
    "new key": b'{"step": 5, "new": {"deep": {"er": 1.5}}}\n',
    "bytes": b'{"step": 5, "\xff": 1}\n',
    "incomplete": b'{"step": 5}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_blocks_are_read_like_single_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(rows_of(range(1, 201))) + DAMAGE[damage])
    monkeypatch.setattr(columns, "BLOCK_ROWS", 10**6)  # a smaller block is read line by line
    by_line, problems = read_columns(file)
    monkeypatch.setattr(columns, "BLOCK_ROWS", 20)
    by_block, block_problems = read_columns(file)
    assert_equal_tables(by_block, by_line)
    assert block_problems == problems


def test_most_blocks_are_parsed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else long files are read four times slower."""
    file = tmp_path / "metrics.jsonl"
    write_rows(file, rows_of(range(1, 1001)))
    monkeypatch.setattr(columns, "BLOCK_ROWS", 20)
    results = []
    original = columns._parse
    monkeypatch.setattr(
        columns, "_parse", lambda lines: results.append(original(lines)) or results[-1]
    )
    read_columns(file)
    assert len(results) == 50 and results.count(None) == 1  # the row with NaN
