"""Read the contents of one file: text, JSON lines (also compressed), parquet and Arrow.

A `Span` names a range of a file. Reading one needs nothing else, so any process can read any span.
A reader yields each content with its offset: text, the values of a record by name, or a `NoDocument`
in place of a content that cannot be read. `documents.read_piece` makes documents of them.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from torchtitan_like.data.data_errors import DataError

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


class NoDocument(Exception):
    """A record that holds no document. The message is the problem. byte: offset in the file."""

    def __init__(self, problem: str, byte: int = 0) -> None:
        super().__init__(problem)
        self.byte = byte


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


# ---- bytes


def decode(raw: bytes, start: int) -> str:
    """Decode UTF-8 bytes that start at byte ``start`` of their file. Raises NoDocument."""
    try:
        return raw.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        # Decoding strips a byte order mark, so error.object can be shorter than raw.
        byte = start + len(raw) - len(error.object) + error.start
        raise NoDocument(
            f"byte 0x{error.object[error.start]:02x} at {byte:,} is not UTF-8 ({error.reason}): "
            "convert the file to UTF-8",
            byte,
        ) from error


def is_compressed(file: str) -> bool:
    """Return True if the file name ends with .gz or .zst."""
    return file.endswith(tuple(EXPANSION))


def open_bytes(file: str) -> IO[bytes]:
    """Open a file for reading; a compressed file is decompressed on the way."""
    if file.endswith(".zst"):
        return io.BufferedReader(_Zstandard(file))
    return gzip.open(file) if is_compressed(file) else open(file, "rb")  # type: ignore[return-value]


class _Zstandard(io.RawIOBase):
    """The content of a zstd file, read by pyarrow.

    It reads equal chunks from the start of the file. So what is lost before a damaged byte, at most a
    chunk, does not depend on the reader.
    """

    CHUNK = 4096

    def __init__(self, file: str) -> None:
        import pyarrow

        self._stream = pyarrow.input_stream(file, compression="zstd")
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk:
            try:
                self._chunk = memoryview(self._stream.read(self.CHUNK))
            except OSError as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._chunk))
        buffer[:size], self._chunk = self._chunk[:size], self._chunk[size:]
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


def _damage(file: str, error: Exception) -> NoDocument:
    """Return the problem of all text from the damaged byte of a compressed file on."""
    kind = "zstd" if file.endswith(".zst") else "gzip"
    return NoDocument(
        f"cannot be decompressed from here on ({error}): the {kind} file is damaged or truncated"
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


def read_text(file: str) -> tuple[int, str | NoDocument]:
    """Read a whole file, which is one document. Returns 0, or the offset of an invalid byte."""
    try:
        with open_bytes(file) as stream:
            return 0, decode(stream.read(), 0)
    except NoDocument as error:
        return error.byte, error
    except DAMAGE_ERRORS as error:
        return 0, _damage(file, error)


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


def read_lines(span: Span) -> Iterator[tuple[int, dict[str, Any] | NoDocument]]:
    """Yield the objects of the lines that start in the byte range of ``span``, by byte offset."""
    offset = 0
    try:
        with open_bytes(span.file) as stream:
            # The line across the border belongs to the previous span.
            offset = _skip_to(stream, max(span.start - 1, 0))
            is_inside_line = span.start > 0
            while is_inside_line and offset < span.stop and (chunk := stream.readline(READ_BYTES)):
                offset += len(chunk)
                is_inside_line = not chunk.endswith(b"\n")
            while offset < span.stop and (line := stream.readline()):
                if line.strip():
                    yield offset, _parse_line(line, offset)
                offset += len(line)
    except DAMAGE_ERRORS as error:
        yield max(offset, span.start), _damage(span.file, error)


def _skip_to(stream: IO[bytes], offset: int) -> int:
    """Go to ``offset`` of a new stream. Returns the offset, or the end of a shorter stream."""
    if stream.seekable():
        return stream.seek(offset)
    position = 0
    while position < offset and (chunk := stream.read(min(offset - position, READ_BYTES))):
        position += len(chunk)
    return position


def _parse_line(line: bytes, start: int) -> dict[str, Any] | NoDocument:
    try:
        record = json.loads(decode(line, start))
    except NoDocument as error:
        return error
    except json.JSONDecodeError as error:
        return NoDocument(f"malformed JSON ({error.msg} at character {error.colno})")
    except (ValueError, RecursionError) as error:  # huge numbers; very deep nesting
        return NoDocument(f"JSON that cannot be read ({error})")
    if not isinstance(record, dict):
        return NoDocument(f"it is a JSON {type(record).__name__}, expected an object")
    return record


# ---- tables


class Table:
    """A parquet or Arrow file as numbered chunks of rows (row groups or record batches).

    field: the column with the text; None: all columns.
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
            self._check_column(field, schema, names)

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
                columns = self._batches if self._field is None else map(self._column, self._batches)
                return [column.nbytes for column in columns]
            # pyarrow 26 crashes when asked for the size of one column of a damaged file.
            metadata = self._parquet.metadata
            return [
                metadata.row_group(index).total_byte_size
                for index in range(metadata.num_row_groups)
            ]

    def rows(self, index: int) -> Iterator[tuple[int, str | dict[str, Any] | NoDocument]]:
        """Yield the rows of one chunk by number, from 1: the text, or all values by column."""
        row = self._rows_before(index)
        with self._data_errors("is damaged"):
            if self._parquet is None:
                batches: Iterable[Any] = [self._batches[index]]
            else:
                columns = None if self._field is None else [self._field]
                batches = self._parquet.iter_batches(
                    batch_size=1024, row_groups=[index], columns=columns
                )
            for batch in batches:
                for content in self._records(batch) if self._field is None else self._texts(batch):
                    row += 1
                    yield row, content

    def _rows_before(self, index: int) -> int:
        if self._parquet is None:
            return sum(batch.num_rows for batch in self._batches[:index])
        metadata = self._parquet.metadata
        return sum(metadata.row_group(earlier).num_rows for earlier in range(index))

    def _records(self, batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
        batch.validate(full=True)
        records: list[dict[str, Any]] = batch.to_pylist()
        return records

    def _texts(self, batch: pyarrow.RecordBatch) -> Iterator[str | NoDocument]:
        """Yield the text of each row. Invalid offsets would crash the process: check first."""
        column = self._column(batch)
        if self._arrow.types.is_dictionary(column.type):
            entries = self._bytes(column.dictionary)
            column = self._arrow.DictionaryArray.from_arrays(column.indices, entries)
        elif not self._arrow.types.is_null(column.type):
            column = self._bytes(column)
        for value in column:
            raw = value.as_py()
            if raw is None:
                yield NoDocument(f'"{self._field}" is null, expected text')
                continue
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                yield NoDocument(f"the text is not UTF-8 ({error.reason})")

    def _column(self, batch: pyarrow.RecordBatch) -> Any:
        column = batch.column(self._field)
        column.validate()  # buffers of a memory-mapped file may be shorter than declared
        return column

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

    def _check_column(self, field: str, schema: pyarrow.Schema, names: list[str]) -> None:
        if field not in names:
            raise DataError(
                f'{self._file} has no column "{field}" but '
                f"{abbreviate(', '.join(names))}: set the source's `text_field`"
            )
        types, kind = self._arrow.types, schema.field(field).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        # In a column of type null, each row is a bad record.
        is_text = types.is_string(value) or types.is_large_string(value)
        if not types.is_null(kind) and not is_text:
            raise DataError(f'{self._file}: column "{field}" is {kind}, expected string')
