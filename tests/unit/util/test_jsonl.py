"""JSONL rows: round trip, truncation, and rewind."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from pathlib import Path

import pytest

from torchtitan_like.util.jsonl import JsonlFile, encode, read_rows


def rows(*steps: int) -> list[dict[str, object]]:
    return [{"step": step, "loss": 1 / (step + 1)} for step in steps]


def test_floats_round_trip_bit_for_bit(tmp_path: Path) -> None:
    generator = random.Random(0)
    bits = [generator.getrandbits(64) for _ in range(500)]
    values = [struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits]
    finite = [value for value in values if math.isfinite(value)]
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append([{"step": i, "loss": value} for i, value in enumerate(finite)])
    assert [row["loss"].hex() for row in read_rows(file.path)] == [value.hex() for value in finite]


def test_numbers_within_a_row_may_be_nan(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    row = {
        "step": 1,
        "sources": {"a": {"loss": math.nan, "n": 3}, "b": {"loss": -math.inf, "n": 0}},
    }
    file.write_bytes(encode(row))
    (actual,) = read_rows(file)
    assert repr(actual) == repr(row)


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, '"nan"'), (math.inf, '"inf"'), (-math.inf, '"-inf"')]
)
def test_non_finite_numbers_are_strings_in_valid_json(
    value: float, text: str, tmp_path: Path
) -> None:
    line = encode({"step": 1, "loss": value})
    assert line == b'{"step": 1, "loss": ' + text.encode() + b"}\n"
    json.loads(line, parse_constant=pytest.fail)
    (tmp_path / "a.jsonl").write_bytes(line)
    assert repr(read_rows(tmp_path / "a.jsonl")[0]["loss"]) == repr(value)


def test_a_truncated_last_line_is_not_a_row(tmp_path: Path) -> None:
    """The writer may be active, killed, or out of disk space."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(encode({"step": 1}) + b'{"step": 2, "loss": 1.')
    assert read_rows(file) == [{"step": 1}]


def test_rows_are_visible_to_other_readers_after_append(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "new" / "a.jsonl")
    file.append(rows(1, 2))
    assert [row["step"] for row in read_rows(file.path)] == [1, 2]
    assert file.byte_offset() == file.path.stat().st_size == len(b"".join(map(encode, rows(1, 2))))
    file.append(rows(3))
    assert file.byte_offset() == file.path.stat().st_size


def test_the_byte_offset_survives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append(rows(1, 2))
    assert synced == [], "expected append not to wait for the disk"
    assert file.byte_offset() == synced[0]


@pytest.mark.parametrize(
    ("content", "step", "kept", "moved"),
    [
        (b"", 5, [], b""),
        (b'{"step": 1}\n{"step": 2}\n', 2, [1, 2], b""),
        (b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', 1, [1], b'{"step": 2}\n{"step": 3}\n'),
        (b'{"step": 1}\n{"step": 2}\n', 0, [], b'{"step": 1}\n{"step": 2}\n'),
        (b'{"step": 1}\n{"step": 2, "lo', 2, [1], b'{"step": 2, "lo'),
        (b'{"step": 1}\n{"step": 2}', 2, [1], b'{"step": 2}'),  # complete except for its newline
        (b'{"step": 1}\n\0\0\0\0\n{"step": 2}\n', 2, [1, 2], b"\0\0\0\0\n"),
        (b'{"step": 1}\n7\n{"no": 1}\n', 9, [1], b'7\n{"no": 1}\n'),
    ],
)
def test_rewind_moves_later_rows_to_another_file(
    content: bytes, step: int, kept: list[int], moved: bytes, tmp_path: Path
) -> None:
    path, discarded = tmp_path / "a.jsonl", tmp_path / "a.discarded-2.jsonl"
    path.write_bytes(content)
    file = JsonlFile(path)
    assert file.rewind(step, discarded) == len(moved.splitlines())
    assert [row["step"] for row in read_rows(path)] == kept
    assert (discarded.read_bytes() if discarded.exists() else b"") == moved
    file.append(rows(step + 1))
    assert [row["step"] for row in read_rows(path)] == [*kept, step + 1]
    assert [entry.name for entry in tmp_path.glob("*.tmp*")] == []


@pytest.mark.parametrize("size", [10, 2**16 - 9, 2**16, 200_000])
def test_size_and_last_row_of_long_files(size: int, tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "a.jsonl")
    assert file.size_and_last_row() == (0, {})
    file.append([{"step": 1, "text": "x" * 300_000}, {"step": 2, "text": "y" * size}])
    assert file.size_and_last_row() == (file.path.stat().st_size, {"step": 2, "text": "y" * size})
    (tmp_path / "b.jsonl").write_bytes(encode({"step": 1, "text": "y" * size}))
    assert JsonlFile(tmp_path / "b.jsonl").size_and_last_row()[1]["step"] == 1


def test_rewind_of_an_open_and_of_a_missing_file(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "a.jsonl")
    assert file.rewind(3, tmp_path / "d.jsonl") == 0
    file.append(rows(1, 2, 3))
    file.rewind(2, tmp_path / "d.jsonl")
    file.append(rows(3))
    assert [row["step"] for row in read_rows(file.path)] == [1, 2, 3]
    assert read_rows(tmp_path / "missing.jsonl") == []


def test_rewind_killed_before_the_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append(rows(1, 2, 3))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            file.rewind(1, tmp_path / "d-1.jsonl")
    assert [row["step"] for row in read_rows(file.path)] == [1, 2, 3]
    file.rewind(1, tmp_path / "d-2.jsonl")
    assert [row["step"] for row in read_rows(file.path)] == [1]
    assert [row["step"] for row in read_rows(tmp_path / "d-2.jsonl")] == [2, 3]
