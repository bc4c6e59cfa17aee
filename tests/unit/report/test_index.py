"""The index of a long metrics.jsonl, and the reader of whole blocks that fills it."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.run_folder import Row, step_row, write_rows
from torchtitan_like.report import tolerant
from torchtitan_like.report.tolerant import Table, read_columns
from torchtitan_like.report.web import index, indexer
from torchtitan_like.report.web.index import read_index, remove_old, update_index


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


def assert_equal_tables(a: Table, b: Table) -> None:
    assert a.num_rows == b.num_rows and sorted(a.names()) == sorted(b.names())
    for name in a.names():
        np.testing.assert_array_equal(a.get(name), b.get(name), err_msg=name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run/metrics.jsonl"
    write_rows(file, rows_of(range(1, 201)))
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# ---- blocks

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
    monkeypatch.setattr(tolerant, "BLOCK", 2**30)  # a smaller block is read line by line
    by_line, problems = read_columns(file)
    monkeypatch.setattr(tolerant, "BLOCK", 4000)
    by_block, block_problems = read_columns(file)
    assert_equal_tables(by_block, by_line)
    assert block_problems == problems


def test_most_blocks_are_parsed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else long files are read four times slower."""
    file = tmp_path / "metrics.jsonl"
    write_rows(file, rows_of(range(1, 1001)))
    monkeypatch.setattr(tolerant, "BLOCK", 4000)
    results: list[bool] = []
    original = tolerant.RowReader._read_at_once

    def record(reader: tolerant.RowReader, block: bytes) -> bool:
        results.append(original(reader, block))
        return results[-1]

    monkeypatch.setattr(tolerant.RowReader, "_read_at_once", record)
    read_columns(file)
    assert results.count(False) <= 5 < 20 < results.count(True)  # first, NaN, late column, last


# ---- the index


def test_an_index_has_the_rows_of_the_file(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tolerant, "BLOCK", 4000)
    monkeypatch.setattr(index, "FLUSH_BYTES", 9000)
    with file.open("ab") as stream:
        stream.write(b"damage\n")
    progress: list[tuple[int, int]] = []
    table = update_index(file, cache, lambda *done: progress.append(done))
    assert_equal_tables(table, read_columns(file)[0])
    assert table.problems("metrics.jsonl") == read_columns(file)[1]
    size = file.stat().st_size
    assert progress[-1] == (size, size) and len(progress) > 5
    assert table.sparkline[-1] == (200.0, math.pi / 200)
    assert [path.name for path in file.parent.iterdir()] == ["metrics.jsonl"]


def test_an_index_grows_with_the_file(file: Path, cache: Path) -> None:
    first = update_index(file, cache)
    content = lines(rows_of(range(201, 301)))
    with file.open("ab") as stream:
        stream.write(content[:-10])
    assert update_index(file, cache).num_rows == 299, "the last line is incomplete"
    with file.open("ab") as stream:
        stream.write(content[-10:])
    table = update_index(file, cache)
    assert_equal_tables(table, read_columns(file)[0])
    assert table.offset == file.stat().st_size
    assert first._content.generation == table._content.generation


def test_old_rows_are_not_read_again(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_index(file, cache)
    with file.open("ab") as stream:
        stream.write(lines(rows_of(range(201, 203))))
    seen: list[int] = []
    original = tolerant.RowReader.read

    def record(reader: tolerant.RowReader, block: bytes) -> None:
        seen.append(block.count(b"\n"))
        original(reader, block)

    monkeypatch.setattr(tolerant.RowReader, "read", record)
    update_index(file, cache)
    assert seen == [2]


def replace_file(file: Path, index_file: Path) -> None:
    other = file.with_name("other")
    write_rows(other, rows_of(range(1, 51)))
    other.replace(file)


def rewrite_in_place(file: Path, index_file: Path) -> None:
    content = lines([{**row, "lr": 0.5} for row in rows_of(range(1, 301))])
    with file.open("r+b") as stream:
        stream.write(content)


def truncate_file(file: Path, index_file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(len(lines(rows_of(range(1, 51)))))


def damage_index(file: Path, index_file: Path) -> None:
    index_file.write_text("{")


def lose_a_column(file: Path, index_file: Path) -> None:
    next(index_file.parent.glob("*-1.f64")).unlink()


def cut_a_column(file: Path, index_file: Path) -> None:
    with next(index_file.parent.glob("*-2.f64")).open("r+b") as stream:
        stream.truncate(80)


def use_another_version(file: Path, index_file: Path) -> None:
    content = json.loads(index_file.read_text())
    index_file.write_text(json.dumps({**content, "version": 0, "num_rows": 7}))


@pytest.mark.parametrize(
    "change",
    [
        replace_file,
        rewrite_in_place,
        truncate_file,
        damage_index,
        lose_a_column,
        cut_a_column,
        use_another_version,
    ],
)
def test_a_wrong_index_is_built_anew(
    file: Path, cache: Path, change: Callable[[Path, Path], None]
) -> None:
    update_index(file, cache)
    change(file, next(cache.glob("*/index.json")))
    assert read_index(file, cache) is None
    assert_equal_tables(update_index(file, cache), read_columns(file)[0])


def test_a_killed_update_does_no_harm(file: Path, cache: Path) -> None:
    """It has appended to columns, and has not replaced index.json."""
    update_index(file, cache)
    for column in cache.glob("*/*.f64"):
        with column.open("ab") as stream:
            stream.write(b"12345678abc")
    with file.open("ab") as stream:
        stream.write(lines(rows_of(range(201, 211))))
    assert_equal_tables(update_index(file, cache), read_columns(file)[0])


def test_links_share_an_index(file: Path, cache: Path) -> None:
    update_index(file, cache)
    hard, soft = file.with_name("hard"), file.with_name("soft")
    os.link(file, hard)
    soft.symlink_to(file)
    for link in (hard, soft):
        table = read_index(link, cache)
        assert table is not None and table.num_rows == 200
    assert len(list(cache.iterdir())) == 1


def test_only_the_user_reads_the_cache(file: Path, cache: Path) -> None:
    update_index(file, cache)
    assert next(cache.iterdir()).stat().st_mode & 0o077 == 0


def test_unused_indexes_are_removed(file: Path, cache: Path) -> None:
    update_index(file, cache)
    used = next(cache.glob("*/index.json")).stat().st_mtime
    remove_old(cache, used + index.MAX_AGE - 1)
    assert read_index(file, cache) is not None
    remove_old(cache, used + index.MAX_AGE + 1)
    assert list(cache.iterdir()) == []


def test_the_indexer_shows_its_progress(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_done, may_end, next_started = (threading.Event() for _ in range(3))
    order: list[str] = []

    def update(file: Path, _: Path, on_progress: Callable[[int, int], None]) -> None:
        order.append(file.name)
        if file.name == "long":
            on_progress(50, 100)
            half_done.set()
            assert may_end.wait(60)
        if file.name == "full":
            raise OSError(28, "No space left on device", str(file))
        if file.name == "last":
            next_started.set()

    monkeypatch.setattr(indexer, "update_index", update)
    worker = indexer.Indexer(cache)
    worker.request(Path("long"))
    worker.start()
    assert half_done.wait(60)
    for name in ("last", "full", "full"):
        worker.request(Path(name))
    worker.request(Path("full"), is_urgent=True)
    assert worker.progress(Path("long")) == 0.5
    assert worker.progress(Path("last")) == 0.0 and worker.progress(Path("other")) is None
    may_end.set()
    assert next_started.wait(60)
    assert order == ["long", "full", "last"]
    assert worker.progress(Path("long")) is None and worker.problem(Path("long")) == ""
    assert "No space left on device" in worker.problem(Path("full"))
