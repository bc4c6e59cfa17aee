"""Read the documents of one file: JSON lines (also compressed), parquet and Arrow.

A `Span` names a range of a file. Reading one needs nothing else, so any process can read any span.
Records that hold no text become `BadRecord`; the caller decides what follows.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

from torchtitan_like.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow

# The errors that reading a damaged compressed file raises.
DAMAGE_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
READ_BYTES = 2**20
# A reader must decompress a file from its start to reach any offset. Spans of compressed files are
# therefore few: each holds about this many bytes of text.
COMPRESSED_BYTES = 64 * 2**20
EXPANSION = {".gz": 2.5, ".zst": 4.0}  # estimated bytes of text of a byte of the file
_END_OF_FILE = 2**62  # larger than any file


# A document: its text, or its parts, each with True if its tokens are trained on.
Document = str | list[tuple[str, bool]]
# Turns a record into a document. Raises BadResult.
Processor = Callable[[Mapping[str, Any]], Document]


class BadResult(Exception):
    """User code does not return a document."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file.

    start, stop: bytes for text and jsonl (decompressed bytes for gzip), row groups for parquet,
    record batches for arrow, documents for a data source of user code. size: estimated bytes of text.
    """

    file: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class BadRecord:
    """A record that holds no text.

    offset: for "byte" the offset of the invalid byte (text) or of the line (jsonl), from 0; for
    "row" the row number, from 1.
    """

    file: str
    unit: Literal["byte", "row"]
    offset: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.offset:,}: {self.problem}"

    def error(self) -> DataError:
        """Return the error to raise. For text and jsonl it counts lines up to the offset."""
        where = (
            f"row {self.offset}"
            if self.unit == "row"
            else f"line {line_number(self.file, self.offset)}"
        )
        return DataError(
            f"{self.file}, {where}: {self.problem} "
            '(data.on_bad_record = "skip" leaves such records out)'
        )


# ---- bytes


class NotUtf8(Exception):
    """Bytes that are not UTF-8. byte: offset of the first invalid byte in its file."""

    def __init__(self, raw: bytes, start: int, error: UnicodeDecodeError) -> None:
        # Decoding strips a byte order mark, so error.object can be shorter than raw.
        self.byte = start + len(raw) - len(error.object) + error.start
        value = error.object[error.start]
        super().__init__(
            f"byte 0x{value:02x} at {self.byte:,} is not UTF-8 ({error.reason}): "
            "convert the file to UTF-8"
        )


def decode(raw: bytes, start: int) -> str:
    """Decode UTF-8 bytes that start at byte ``start`` of their file. Raises NotUtf8."""
    try:
        return raw.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise NotUtf8(raw, start, error) from error


def is_compressed(file: str) -> bool:
    """Return True if the file name ends with .gz or .zst."""
    return file.endswith(tuple(EXPANSION))


def open_bytes(file: str) -> IO[bytes]:
    """Open a file for reading; a compressed file is decompressed on the way."""
    if file.endswith(".zst"):
        return io.BufferedReader(_Zstandard(file))
    return gzip.open(file) if is_compressed(file) else open(file, "rb")  # type: ignore[return-value]


class _Zstandard(io.RawIOBase):
    """The content of a zstd file, read by pyarrow. `seek` goes forward only, from the start.

    It reads equal chunks from the start of the file. So what is lost before a damaged byte, at most a
    chunk, does not depend on the reader.
    """

    CHUNK = 4096

    def __init__(self, file: str) -> None:
        import pyarrow

        self._stream = pyarrow.input_stream(file, compression="zstd")
        self._chunk = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk:
            try:
                self._chunk = memoryview(self._stream.read(self.CHUNK))
            except OSError as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._chunk))
        buffer[:size], self._chunk = self._chunk[:size], self._chunk[size:]
        self._position += size
        return size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self._position:
            raise io.UnsupportedOperation("a zstd file is read forward")
        skipped = memoryview(bytearray(self.CHUNK))
        while self._position < offset and self.readinto(skipped[: offset - self._position]):
            pass
        return self._position

    def close(self) -> None:
        self._stream.close()
        super().close()


def damaged_file(file: str, offset: int, error: Exception) -> BadRecord:
    """Return a bad record in place of all text after ``offset`` of a damaged compressed file."""
    kind = "zstd" if file.endswith(".zst") else "gzip"
    return BadRecord(
        file,
        "byte",
        offset,
        f"cannot be decompressed from here on ({error}): the {kind} file is damaged or truncated",
    )


def line_number(file: str, offset: int) -> int:
    """Return the line, from 1, that contains byte ``offset``."""
    newlines = 0
    with open_bytes(file) as stream, suppress(*DAMAGE_ERRORS):
        while offset > 0 and (chunk := stream.read(min(offset, READ_BYTES))):
            newlines += chunk.count(b"\n")
            offset -= len(chunk)
    return newlines + 1


def abbreviate(text: str, limit: int = 400) -> str:
    """Return ``text``, shortened to ``limit`` characters for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def read_text(file: str, process: Processor | None = None) -> Document | BadRecord:
    """Read a whole file as one document. process: takes the record {"text": text}."""
    try:
        with open_bytes(file) as stream:
            text = decode(stream.read(), 0)
        return text if process is None else process({"text": text})
    except BadResult as error:
        return BadRecord(file, "byte", 0, str(error))
    except NotUtf8 as error:
        return BadRecord(file, "byte", error.byte, str(error))
    except DAMAGE_ERRORS as error:
        return damaged_file(file, 0, error)


# ---- JSON lines


def estimated_text_bytes(file: str, size: int) -> int:
    """Estimate the bytes of text in a compressed file of ``size`` bytes."""
    return int(size * EXPANSION[os.path.splitext(file)[1]])


def num_compressed_spans(file: str, size: int) -> int:
    """Return the number of spans of a compressed file of ``size`` bytes."""
    return -(-estimated_text_bytes(file, size) // COMPRESSED_BYTES)


def compressed_span(file: str, index: int, num_spans: int) -> Span:
    """Return span ``index`` of ``num_spans`` equal ranges of the decompressed bytes.

    The size of a gzip file comes from its last four bytes (ISIZE in RFC 1952: the size of the last
    member, modulo 2**32). Of other files it is estimated. The last span always ends at the end of
    the file.
    """
    size = num_spans * COMPRESSED_BYTES
    if file.endswith(".gz"):
        with open(file, "rb") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 4, 0))
            size = int.from_bytes(stream.read(4), "little")
    stop = _END_OF_FILE if index + 1 == num_spans else size * (index + 1) // num_spans
    text_bytes = estimated_text_bytes(file, os.stat(file).st_size) // num_spans
    return Span(file, size * index // num_spans, stop, text_bytes)


def read_lines(
    span: Span, field: str, process: Processor | None = None
) -> Iterator[Document | BadRecord]:
    """Yield the documents of the lines that start in the byte range of ``span``.

    process: takes the objects of lines; None: the text is in ``field``.
    """
    for offset, line in lines_of(span):
        if isinstance(line, BadRecord):
            yield line
            continue
        try:
            if process is None:
                yield _parse_line(line, offset, field)
            else:
                yield process(_parse_object(line, offset, "a JSON object"))
        except (NotUtf8, _NoText, BadResult) as error:
            yield BadRecord(span.file, "byte", offset, str(error))


def lines_of(span: Span) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Yield the lines that `read_lines` reads, and their offsets."""
    offset = span.start
    try:
        with open_bytes(span.file) as stream:
            if span.start > 0:  # the line across the border belongs to the previous span
                stream.seek(span.start - 1)
                offset = span.start - 1
                while offset < span.stop and (chunk := stream.readline(READ_BYTES)):
                    offset += len(chunk)
                    if chunk.endswith(b"\n"):
                        break
            while offset < span.stop and (line := stream.readline()):
                if line.strip():
                    yield offset, line
                offset += len(line)
    except DAMAGE_ERRORS as error:
        yield offset, damaged_file(span.file, offset, error)


class _NoText(Exception):
    """A line without the requested text."""


def _parse_object(line: bytes, start: int, expected: str) -> dict[str, Any]:
    try:
        document = json.loads(decode(line, start))
    except json.JSONDecodeError as error:
        problem = f"malformed JSON ({error.msg} at character {error.colno})"
        raise _NoText(f"{problem}; expected {expected}") from error
    except (ValueError, RecursionError) as error:  # huge numbers; very deep nesting
        raise _NoText(f"JSON that cannot be read ({error}); expected {expected}") from error
    if not isinstance(document, dict):
        raise _NoText(f"it is a JSON {type(document).__name__}; expected {expected}")
    return document


def _parse_line(line: bytes, start: int, field: str) -> str:
    expected = f'a JSON object with text in "{field}"'

    def no_text(problem: str) -> _NoText:
        return _NoText(f"{problem}; expected {expected}")

    document = _parse_object(line, start, expected)
    if field not in document:
        names = ", ".join(map(repr, document)) or "none"
        raise no_text(
            f'no field "{field}" among {abbreviate(names)} (set the source\'s `text_field`)'
        )
    text = document[field]
    if not isinstance(text, str):
        raise no_text(f'"{field}" is {abbreviate(json.dumps(text), 40)}')
    if b"\\u" in line:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise no_text(
                f"half of a surrogate pair at character {error.start + 1} of the text"
            ) from error
    return text


# ---- tables


def read_table(
    span: Span, format_name: str, field: str, process: Processor | None = None
) -> Iterator[Document | BadRecord]:
    """Yield the documents of row groups or record batches [start, stop) of ``span``.

    process: takes the rows by column; None: the text is in ``field``.
    """
    if process is not None:
        yield from _processed_rows(span, format_name, process)
        return
    with Table(span.file, format_name, field) as table:
        for index in range(span.start, span.stop):
            for row, raw in enumerate(table.column(index), start=table.rows_before(index) + 1):
                if raw is None:
                    yield BadRecord(span.file, "row", row, f'"{field}" is null, expected text')
                    continue
                try:
                    yield raw.decode()
                except UnicodeDecodeError as error:
                    problem = f"the text is not UTF-8 ({error.reason})"
                    yield BadRecord(span.file, "row", row, problem)


def _processed_rows(
    span: Span, format_name: str, process: Processor
) -> Iterator[Document | BadRecord]:
    with Table(span.file, format_name, None) as table:
        for index in range(span.start, span.stop):
            for row, record in enumerate(table.records(index), start=table.rows_before(index) + 1):
                try:
                    yield process(record)
                except BadResult as error:
                    yield BadRecord(span.file, "row", row, str(error))


class Table:
    """A parquet or Arrow file as numbered chunks of rows (row groups or record batches).

    field: the column with the text; None: all columns, for `records`.
    pyarrow is imported in the constructor, so that other formats do not need it.
    """

    def __init__(self, file: str, format_name: str, field: str | None) -> None:
        import pyarrow
        import pyarrow.parquet

        self._file = file
        self._field = field
        self._arrow = pyarrow
        self._parquet: Any = None
        self._batches: list[Any] = []
        with self._data_errors(f"is not a readable {format_name} file"):
            if format_name == "parquet":
                self._parquet = pyarrow.parquet.ParquetFile(file)
                schema = self._parquet.schema_arrow
            else:
                self._batches, schema = self._open_arrow(file)
            names = schema.names
        if field is not None:
            self._check_column(schema, names)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parquet is not None:
            self._parquet.close()

    @contextmanager
    def _data_errors(self, problem: str) -> Iterator[None]:
        """Turn any error inside into a DataError; pyarrow raises many types for damaged files."""
        try:
            yield
        except Exception as error:
            raise DataError(f"{self._file} {problem}: {error}") from error

    def sizes(self) -> list[int]:
        """Return the bytes of each chunk. For parquet this includes all columns of the file."""
        with self._data_errors("is damaged"):
            if self._parquet is None:
                columns = (
                    self._batches if self._field is None else map(self._strings, self._batches)
                )
                return [column.nbytes for column in columns]
            # pyarrow 26 crashes when asked for the size of one column of a damaged file.
            metadata = self._parquet.metadata
            return [
                metadata.row_group(index).total_byte_size
                for index in range(metadata.num_row_groups)
            ]

    def column(self, index: int) -> Iterator[bytes | None]:
        """Yield the texts of one chunk, not yet decoded."""
        with self._data_errors("is damaged"):
            if self._parquet is None:
                batches: Iterable[Any] = [self._batches[index]]
            else:
                batches = self._parquet.iter_batches(
                    batch_size=1024, row_groups=[index], columns=[self._field]
                )
            for batch in batches:
                yield from self._raw(self._strings(batch))

    def rows_before(self, index: int) -> int:
        """Return the number of rows in all chunks before chunk ``index``."""
        if self._parquet is None:
            return sum(batch.num_rows for batch in self._batches[:index])
        metadata = self._parquet.metadata
        return sum(metadata.row_group(earlier).num_rows for earlier in range(index))

    def records(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of one chunk by column."""
        with self._data_errors("is damaged"):
            if self._parquet is None:
                batches: Iterable[Any] = [self._batches[index]]
            else:
                batches = self._parquet.iter_batches(batch_size=1024, row_groups=[index])
            for batch in batches:
                batch.validate(full=True)
                yield from batch.to_pylist()

    def _strings(self, batch: pyarrow.RecordBatch) -> Any:
        column = batch.column(self._field)
        column.validate()  # buffers of a memory-mapped file may be shorter than declared
        return column

    def _raw(self, column: Any) -> Iterator[bytes | None]:
        """Yield the bytes of each string. Invalid offsets would crash the process: check first."""
        if self._arrow.types.is_null(column.type):
            yield from [None] * len(column)
        elif self._arrow.types.is_dictionary(column.type):
            indices, strings = column.indices, self._bytes(column.dictionary)
            indices.validate(full=True)
            for index in indices:
                number = index.as_py()
                if number is not None and not 0 <= number < len(strings):
                    raise ValueError(f"entry {number} of a dictionary of {len(strings)}")
                yield None if number is None else strings[number].as_py()
        else:
            yield from (value.as_py() for value in self._bytes(column))

    def _bytes(self, strings: Any) -> Any:
        is_large = self._arrow.types.is_large_string(strings.type)
        raw = strings.view(self._arrow.large_binary() if is_large else self._arrow.binary())
        raw.validate(full=True)
        return raw

    def _open_arrow(self, file: str) -> tuple[list[pyarrow.RecordBatch], pyarrow.Schema]:
        """Memory-map the record batches of an Arrow stream (as `datasets` writes) or Arrow file."""
        source = self._arrow.memory_map(file)
        if source.read(6) == b"ARROW1":
            reader = self._arrow.ipc.open_file(source)
            batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
            return batches, reader.schema
        source.seek(0)
        stream = self._arrow.ipc.open_stream(source)
        return list(stream), stream.schema

    def _check_column(self, schema: pyarrow.Schema, names: list[str]) -> None:
        if self._field not in names:
            raise DataError(
                f'{self._file} has no column "{self._field}" but '
                f"{abbreviate(', '.join(names))}: set the source's `text_field`"
            )
        kind = schema.field(self._field).type
        value = kind.value_type if self._arrow.types.is_dictionary(kind) else kind
        # In a column of type null, each row is a bad record.
        types = self._arrow.types
        tests = (types.is_string, types.is_large_string)
        if not types.is_null(kind) and not any(test(value) for test in tests):
            raise DataError(f'{self._file}: column "{self._field}" is {kind}, expected string')
