"""An index of a metrics.jsonl in the reader's cache: its columns as files of float64.

An index is found by device and inode, so links to one file share it. It grows with the file. A file
that was replaced, as by a resume, has a new index.

    <cache>/<device>-<inode>/
        index.json              `Content`
        lock                    held by the process that updates the index
        <generation>-<n>.f64    the values of column n, without missing ones at its end
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchtitan_like.report.decimation import decimate
from torchtitan_like.report.tolerant import (
    MAX_LINE,
    Columns,
    Floats,
    RowReader,
    SkippedLines,
    blocks,
)
from torchtitan_like.util.file_lock import file_lock
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.reading import read_json

VERSION = 1
EDGE = 4096  # bytes at both ends of the indexed part whose hash is compared
FLUSH_BYTES = 2**26  # of the file, after which the index is written
SPARK_POINTS = 120
MAX_AGE = 30 * 86400.0  # seconds since its last use after which an index is removed


@dataclass
class Content:
    """Content of index.json. offset: bytes of the file in the index.

    columns: name of each column -> number of its stored values. head, tail: hashes of the first
    and last `EDGE` bytes of the indexed part. sparkline: step and loss of some rows.
    """

    version: int = VERSION
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    offset: int = 0
    num_rows: int = 0
    num_lines: int = 0
    by_reason: dict[str, list[int]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    head: str = ""
    tail: str = ""
    sparkline: list[tuple[float, float]] = field(default_factory=list)


class StoredTable:
    """A `Table` whose columns are read from an index."""

    def __init__(self, folder: Path, content: Content) -> None:
        self._folder = folder
        self._content = content

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._content.num_rows

    @property
    def offset(self) -> int:
        """Number of bytes of the file in the index."""
        return self._content.offset

    @property
    def sparkline(self) -> list[tuple[float, float]]:
        """Step and loss of some rows."""
        return self._content.sparkline

    def names(self) -> list[str]:
        """Return the names of all columns, in the order of their first value."""
        return list(self._content.columns)

    def get(self, name: str) -> Floats:
        """Return a column, float64 (rows,). Raises OSError if the index was replaced."""
        values = np.full(self.num_rows, math.nan)
        stored = self._content.columns.get(name)
        if stored is not None:
            number = self.names().index(name)
            file = _column_file(self._folder, self._content, number)
            values[:stored] = np.fromfile(file, dtype=np.float64, count=stored)
        return values

    def problems(self, name: str) -> list[str]:
        """Return one sentence for each reason why lines were skipped. name: of the file."""
        content = self._content
        return SkippedLines(name, content.num_lines, content.by_reason).problems()


def read_index(file: Path, cache: Path) -> StoredTable | None:
    """Return the index of a file, which may have grown since; None without one. Raises OSError."""
    with file.open("rb") as stream:
        folder = _folder(stream, cache)
        content = _read_content(folder, stream)
    return None if content is None else StoredTable(folder, content)


def update_index(
    file: Path, cache: Path, on_progress: Callable[[int, int], None] = lambda done, size: None
) -> StoredTable:
    """Add the new rows of a file to its index. Raises OSError.

    on_progress: receives the bytes in the index and in the file. The last line is left out if it is
    incomplete.
    """
    with file.open("rb") as stream:
        folder = _folder(stream, cache)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as lock, file_lock(lock):
            content = _read_content(folder, stream) or Content()
            size = os.fstat(stream.fileno()).st_size
            if content.offset < size or not content.head:
                _add_rows(stream, folder, content, lambda done: on_progress(done, size))
            os.utime(folder / "index.json")
    return StoredTable(folder, content)


def remove_old(cache: Path, now: float) -> None:
    """Remove indexes that were not used for `MAX_AGE`. now: Unix time."""
    for file in cache.glob("*/index.json"):
        with suppress(OSError):
            if now - file.stat().st_mtime > MAX_AGE:
                shutil.rmtree(file.parent)


def _folder(stream: BinaryIO, cache: Path) -> Path:
    stats = os.fstat(stream.fileno())
    return cache / f"{stats.st_dev}-{stats.st_ino}"


def _column_file(folder: Path, content: Content, number: int) -> Path:
    return folder / f"{content.generation}-{number}.f64"


def _read_content(folder: Path, stream: BinaryIO) -> Content | None:
    """Return the index if it belongs to the file and is complete, else None."""
    try:
        content = Content(**read_json(folder / "index.json"))
        is_valid = content.version == VERSION and (content.head, content.tail) == _edges(
            stream, content.offset
        )
        for number, stored in enumerate(content.columns.values()):
            size = _column_file(folder, content, number).stat().st_size
            is_valid = is_valid and size >= 8 * stored
    except (OSError, TypeError, ValueError, AttributeError):
        return None
    return content if is_valid else None


def _edges(stream: BinaryIO, offset: int) -> tuple[str, str]:
    """Return the hashes of the first and last bytes up to an offset."""
    hashes = []
    for start in (0, max(0, offset - EDGE)):
        stream.seek(start)
        edge = stream.read(min(EDGE, offset))
        hashes.append(hashlib.sha256(edge).hexdigest() if len(edge) == min(EDGE, offset) else "")
    return hashes[0], hashes[1]


def _add_rows(
    stream: BinaryIO, folder: Path, content: Content, on_progress: Callable[[int], None]
) -> None:
    """Add all complete lines after `content.offset` to the index."""
    stream.seek(content.offset)
    reader = RowReader("", SkippedLines("", content.num_lines, content.by_reason))
    end = content.offset
    for block in blocks(stream):
        incomplete = len(block) - block.rfind(b"\n") - 1
        if incomplete < MAX_LINE:  # else the line is damaged
            block = block[: len(block) - incomplete]
            end = stream.tell() - incomplete
        else:
            end = stream.tell()
        reader.read(block)
        on_progress(end)
        if end - content.offset >= FLUSH_BYTES:
            _write(stream, folder, content, reader, end)
            stream.seek(end)
            reader.columns = Columns()
    _write(stream, folder, content, reader, end)


def _write(
    stream: BinaryIO, folder: Path, content: Content, reader: RowReader, offset: int
) -> None:
    """Append the columns of the reader to their files, then replace index.json."""
    for name, values in reader.columns.stored().items():
        stored = content.columns.setdefault(name, 0)
        number = list(content.columns).index(name)
        with open(_column_file(folder, content, number), "ab") as file:
            file.truncate(8 * stored)  # an update may have been killed after this file
            file.write(np.full(content.num_rows - stored, math.nan).tobytes())
            file.write(values)
        content.columns[name] = content.num_rows + len(values)
    content.num_rows += reader.columns.num_rows
    content.offset = offset
    content.num_lines = reader.skipped.num_lines
    content.by_reason = reader.skipped.by_reason
    content.head, content.tail = _edges(stream, offset)
    table = StoredTable(folder, content)
    step, loss = table.get("step"), table.get("loss")
    content.sparkline = [
        (float(step[row]), float(loss[row])) for row in decimate(loss, SPARK_POINTS)
    ]
    document: dict[str, Any] = asdict(content)
    write_atomically(folder / "index.json", json.dumps(document), durable=False)
    for old in folder.glob("*.f64"):
        if not old.name.startswith(f"{content.generation}-"):
            old.unlink(missing_ok=True)
