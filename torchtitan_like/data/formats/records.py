"""What a file holds: ranges of it, texts, and what stands where a text should."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

from ..errors import DataError

# What reading a gzip file raises that is damaged, or none.
NOT_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file: bytes (text, jsonl; unpacked ones of a gzip file), row groups (parquet) or record batches (arrow).

    size: about the bytes of text in it.
    """

    file: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class BadRecord:
    """What stands where a document should. place: the byte at fault (text) or its line's first (jsonl), counted from 0, or
    the row, counted from 1.
    """

    file: str
    unit: Literal["byte", "row"]
    place: int
    found: str

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.place:,}: {self.found}"

    def error(self) -> DataError:
        """The same with the line in place of the byte, for which the file is read up to there."""
        row = f"row {self.place}" if self.unit == "row" else f"line {line_number(self.file, self.place)}"
        return DataError(f'{self.file}, {row}: {self.found} (data.on_bad_record = "skip" leaves such records out)')


class NotUtf8(Exception):
    """byte: where in its file the one at fault stands."""

    def __init__(self, raw: bytes, start: int, error: UnicodeDecodeError) -> None:
        self.byte = start + len(raw) - len(error.object) + error.start  # a mark at the begin is no part of the object
        found = f"byte 0x{error.object[error.start]:02x} at {self.byte:,} is not UTF-8 ({error.reason})"
        super().__init__(f"{found}: convert the file to UTF-8")


def decode(raw: bytes, start: int) -> str:
    """Text of ``raw``, which starts at byte ``start`` of its file. Raises NotUtf8."""
    try:
        return raw.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise NotUtf8(raw, start, error) from error


def not_unpacked(file: str, place: int, error: Exception) -> BadRecord:
    """What stands for the rest of a range of a gzip file."""
    told = f"cannot be unpacked from here on ({error}): the gzip file is damaged or was cut off"
    return BadRecord(file, "byte", place, told)


def is_gzip(file: str) -> bool:
    return file.endswith(".gz")


def open_bytes(file: str) -> IO[bytes]:
    """To be read; a gzip file is unpacked."""
    return gzip.open(file) if is_gzip(file) else open(file, "rb")  # type: ignore[return-value]


def line_number(file: str, position: int) -> int:
    """The line, counted from 1, in which byte ``position`` stands."""
    newlines = 0
    with open_bytes(file) as stream, suppress(*NOT_GZIP):
        while position > 0 and (chunk := stream.read(min(position, READ_BYTES))):
            newlines += chunk.count(b"\n")
            position -= len(chunk)
    return newlines + 1


def short(text: str, limit: int = 400) -> str:
    """As much of ``text`` as belongs in a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."
