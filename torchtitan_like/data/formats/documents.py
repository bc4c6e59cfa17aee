"""Documents in files: which files a path means, how they are cut into pieces of work, and the texts of a piece.

A piece is a pure description (file, range); reading it needs nothing else, so any process can read any piece. Documents
are numbered by file in the order of names, then by their place in the file; pieces keep that order.

Formats: *text*, a file is one document; *jsonl*, a line is a JSON object with the text in one field, blank lines
are skipped; *parquet* and *arrow* (also a Hugging Face data set saved to disk), a row is a document and a column
holds the text. Text is UTF-8. Anything else is a bad record, which raises DataError with file and line (or row), or is
left out where that is asked for. A file that cannot be read as its format is always an error.
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from ..errors import DataError
from .hub import local_path

if TYPE_CHECKING:
    import pyarrow

Format = Literal["text", "jsonl", "parquet", "arrow"]
OnBadRecord = Literal["error", "skip"]

ENDINGS: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
CACHE_FOLDER_NAME = "token_cache"  # never taken for data

# Work is cut into pieces of about this size: one is read, tokenised and committed as a whole. A half-built token cache
# counts pieces, so cutting them differently needs another version.
PIECE_BYTES = 8 * 2**20
PIECES_VERSION = 2
# Lines are streamed in blocks of this size. Another one is another order: streaming.WINDOW_VERSION.
BLOCK_BYTES = 2 * 2**20
_READ_BYTES = 2**20
_READERS = 16  # files that are asked at once what is in them
_DATASET_MARKS = ("dataset_info.json", "state.json")


@dataclass(frozen=True)
class Corpus:
    """The files of one source, sorted. ``folder`` is the deepest one that holds them all."""

    folder: Path
    files: tuple[Path, ...]
    format: Format
    text_field: str
    on_bad_record: OnBadRecord = "error"


@dataclass(frozen=True)
class Span:
    """A range of a file: bytes (text, jsonl), row groups (parquet) or record batches (arrow).

    size: about the bytes of text in it.
    """

    file: Path
    start: int
    stop: int
    size: int


Piece = tuple[Span, ...]


@dataclass(frozen=True)
class BadRecord:
    """What stands where a document should. place: the byte at fault (text) or its line's first (jsonl), counted from 0, or
    the row, counted from 1.
    """

    file: Path
    unit: Literal["byte", "row"]
    place: int
    found: str

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.place:,}: {self.found}"

    def error(self) -> DataError:
        """The same with the line in place of the byte, for which the file is read up to there."""
        row = f"row {self.place}" if self.unit == "row" else f"line {_line_number(self.file, self.place)}"
        return DataError(f'{self.file}, {row}: {self.found} (data.on_bad_record = "skip" leaves such records out)')


def find_corpus(
    path: str, format_name: str = "auto", text_field: str = "text", on_bad_record: OnBadRecord = "error"
) -> Corpus:
    """The files that ``path`` (a file, a glob, a folder with all below it, or what `hub` downloads) means.

    Raises DataError where there is none, or where the format cannot be told.
    """
    path = local_path(path)
    given = Path(path).expanduser()
    if given.is_file():
        files = [given]
    elif given.is_dir():
        files = _files_below(given, format_name)
    else:
        matches = glob.glob(str(given), recursive=True)
        files = sorted(Path(match) for match in matches if os.path.isfile(match))
    if not files:
        what = "a folder without files of a known ending" if given.is_dir() else "not a file, folder or matching glob"
        raise DataError(
            f"no data at {path!r}: it is {what} (relative paths start at {os.getcwd()}; {_known_endings()})"
        )
    files = [file.absolute() for file in files]
    found_format = _format_of(files) if format_name == "auto" else format_name
    folder = Path(os.path.commonpath([file.parent for file in files]))
    name: Any = found_format  # one of Format: checked by the schema
    return Corpus(folder, tuple(files), name, text_field, on_bad_record)


def plan_pieces(corpus: Corpus) -> list[Piece]:
    """Cut the corpus into pieces of about ``PIECE_BYTES``; small files are put together. Reads no text."""
    pieces: list[Piece] = []
    current: list[Span] = []
    size = 0
    for file in corpus.files:
        for span in _spans(corpus, file):
            if current and size + span.size > PIECE_BYTES:
                pieces.append(tuple(current))
                current, size = [], 0
            size += span.size
            if current and current[-1].file == file:
                span = Span(file, current[-1].start, span.stop, current.pop().size + span.size)
            current.append(span)
    return [*pieces, tuple(current)] if current else pieces


class Blocks:
    """The corpus in blocks, numbered on end: ranges of lines, row groups, record batches, whole files of text.

    num_bytes: about the bytes of text in all of them. identity: number of the files, and a hash of their names and sizes.
    Reads no text; of tables, what each file says of itself.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._files = corpus.files
        self._step = BLOCK_BYTES if corpus.format == "jsonl" else 1

        def count(file: Path) -> tuple[int, int]:
            if corpus.format in ("parquet", "arrow"):
                with _Table(file, corpus.format, corpus.text_field) as table:
                    sizes = table.sizes()
                return len(sizes), sum(sizes)
            size = file.stat().st_size
            return -(-size // (BLOCK_BYTES if corpus.format == "jsonl" else max(size, 1))), size

        with ThreadPoolExecutor(_READERS) as pool:
            counts = list(pool.map(count, corpus.files))
        self._ends = list(accumulate(num_blocks for num_blocks, _ in counts))
        self.num_bytes = sum(num_bytes for _, num_bytes in counts)
        names = [(file.relative_to(corpus.folder).as_posix(), file.stat().st_size) for file in corpus.files]
        self.identity = f"{len(names)} files, {xxhash.xxh3_64_hexdigest(json.dumps(names).encode())}"
        if not self._ends[-1]:
            raise DataError(f"no text in the {len(corpus.files)} files of {corpus.folder}")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Span:
        """Without its size."""
        file = bisect_right(self._ends, number)
        index = number - (self._ends[file - 1] if file else 0)
        return Span(self._files[file], index * self._step, (index + 1) * self._step, 0)


def piece_size(piece: Iterable[Span]) -> int:
    """About the bytes of text of a piece."""
    return sum(span.size for span in piece)


def read_piece(corpus: Corpus, piece: Iterable[Span]) -> Iterator[str | BadRecord]:
    """The documents of ``piece`` in order, and bad records in their places where ``on_bad_record`` is "skip".

    Raises DataError, with file and line (or row), for a bad record otherwise, and for a file that is not of the format.
    """
    for span in piece:
        for document in _documents(corpus, span):
            if isinstance(document, BadRecord) and corpus.on_bad_record == "error":
                raise document.error()
            yield document


def _documents(corpus: Corpus, span: Span) -> Iterator[str | BadRecord]:
    if corpus.format == "text":
        return iter([_read_text(span.file)])
    if corpus.format == "jsonl":
        return _read_lines(span, corpus.text_field)
    return _read_table(span, corpus.format, corpus.text_field)


def _files_below(folder: Path, format_name: str) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").exists())
        raise DataError(
            f"{folder} holds several splits ({', '.join(splits)}): give the path of one, as {folder / splits[0]}"
        )
    if format_name == "auto" and all((folder / mark).exists() for mark in _DATASET_MARKS):
        format_name = "arrow"
    names = ENDINGS.values() if format_name == "auto" else [ENDINGS[format_name]]
    return files_below(folder, tuple(ending for group in names for ending in group))


def files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Files with these endings in ``folder`` and the folders in it, sorted; without hidden ones and token caches."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != CACHE_FOLDER_NAME]
        found += [Path(parent, name) for name in files if name.endswith(endings) and not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def _known_endings() -> str:
    endings = "; ".join(f"{name}: {' '.join(endings)}" for name, endings in ENDINGS.items())
    return f'known endings: {endings}; files of token ids need format = "tokens"'


def _format_of(files: list[Path]) -> str:
    by_ending = {ending: name for name, endings in ENDINGS.items() for ending in endings}
    found: dict[str, Path] = {}
    for file in files:
        if file.suffix not in by_ending:
            raise DataError(
                f"the format of {file} cannot be told by its ending ({_known_endings()}): set the source's `format`"
            )
        found.setdefault(by_ending[file.suffix], file)
    if len(found) > 1:
        examples = ", ".join(f"{name} ({file})" for name, file in found.items())
        raise DataError(
            f"files of several formats in one source: {examples}; set the source's `format` or give a narrower path"
        )
    return next(iter(found))


def _spans(corpus: Corpus, file: Path) -> Iterator[Span]:
    if corpus.format in ("text", "jsonl"):
        size = file.stat().st_size
        step = PIECE_BYTES if corpus.format == "jsonl" else max(size, 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield Span(file, start, stop, stop - start)
        return
    with _Table(file, corpus.format, corpus.text_field) as table:
        for index, size in enumerate(table.sizes()):
            yield Span(file, index, index + 1, size)


def _read_text(file: Path) -> str | BadRecord:
    try:
        return _decode(file.read_bytes(), 0)
    except _NotUtf8 as fault:
        return BadRecord(file, "byte", fault.byte, str(fault))


class _NotUtf8(Exception):
    def __init__(self, raw: bytes, start: int, error: UnicodeDecodeError) -> None:
        self.byte = start + len(raw) - len(error.object) + error.start  # a mark at the begin is no part of the object
        found = f"byte 0x{error.object[error.start]:02x} at {self.byte:,} is not UTF-8 ({error.reason})"
        super().__init__(f"{found}: convert the file to UTF-8")


def _decode(raw: bytes, start: int) -> str:
    """Text of ``raw``, which starts at byte ``start`` of its file. Raises _NotUtf8."""
    try:
        return raw.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise _NotUtf8(raw, start, error) from error


def _line_number(file: Path, position: int) -> int:
    """The line, counted from 1, in which byte ``position`` stands."""
    newlines = 0
    with file.open("rb") as stream:
        while position > 0 and (chunk := stream.read(min(position, _READ_BYTES))):
            newlines += chunk.count(b"\n")
            position -= len(chunk)
    return newlines + 1


def _read_lines(span: Span, field: str) -> Iterator[str | BadRecord]:
    """Documents of the lines that begin in the byte range of ``span``."""
    with span.file.open("rb") as stream:
        if span.start > 0:  # the line across the border belongs to the range before
            stream.seek(span.start - 1)
            while stream.tell() < span.stop and (part := stream.readline(_READ_BYTES)) and not part.endswith(b"\n"):
                continue
        while (start := stream.tell()) < span.stop and (line := stream.readline()):
            if line.strip():
                try:
                    yield _parse_line(line, start, field)
                except (_NotUtf8, _NoText) as fault:
                    yield BadRecord(span.file, "byte", start, str(fault))


class _NoText(Exception):
    """A line without the text that is wanted; says what is there."""


def _parse_line(line: bytes, start: int, field: str) -> str:
    def fault(found: str) -> _NoText:
        return _NoText(f'{found}; expected a JSON object with text in "{field}"')

    try:
        document = json.loads(_decode(line, start))
    except json.JSONDecodeError as error:
        raise fault(f"malformed JSON ({error.msg} at character {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nested without end
        raise fault(f"JSON that cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise fault(f"found a JSON {type(document).__name__}")
    if field not in document:
        names = ", ".join(map(repr, document)) or "none"
        raise fault(f'no field "{field}" among {_short(names)} (set the source\'s `text_field`)')
    text = document[field]
    if not isinstance(text, str):
        raise fault(f'"{field}" is {_short(json.dumps(text), 40)}')
    if b"\\u" in line:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise fault(f"half of a surrogate pair at character {error.start + 1} of the text") from error
    return text


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _read_table(span: Span, format_name: str, field: str) -> Iterator[str | BadRecord]:
    with _Table(span.file, format_name, field) as table:
        for index in range(span.start, span.stop):
            for row, raw in enumerate(table.column(index), start=table.rows_before(index) + 1):
                if raw is None:
                    yield BadRecord(span.file, "row", row, f'"{field}" is null, expected text')
                    continue
                try:
                    yield raw.decode()
                except UnicodeDecodeError as error:
                    yield BadRecord(span.file, "row", row, f"the text is not UTF-8 ({error.reason})")


class _Table:
    """A parquet or arrow file as numbered chunks of rows. pyarrow is imported here, so that other formats do not
    need it.
    """

    def __init__(self, file: Path, format_name: str, field: str) -> None:
        import pyarrow
        import pyarrow.parquet

        self._file, self._field = file, field
        self._arrow = pyarrow
        self._parquet: Any = None
        self._batches: list[Any] = []
        with self._refusing(f"is not a readable {format_name} file"):
            if format_name == "parquet":
                self._parquet = pyarrow.parquet.ParquetFile(str(file))
                schema = self._parquet.schema_arrow
            else:
                self._batches, schema = self._open_arrow(file)
            names = schema.names
        self._check_column(schema, names)

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parquet is not None:
            self._parquet.close()

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """What pyarrow raises for damaged files is of many kinds."""
        try:
            yield
        except Exception as error:
            raise DataError(f"{self._file} {what}: {error}") from error

    def sizes(self) -> list[int]:
        """Bytes of each chunk; more than its text where a parquet file has other columns."""
        with self._refusing("is damaged"):
            if self._parquet is None:
                return [self._strings(batch).nbytes for batch in self._batches]
            # Of all columns: to ask for one of a damaged file ends the process (pyarrow 26).
            metadata = self._parquet.metadata
            return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]

    def column(self, index: int) -> Iterator[bytes | None]:
        """The texts of one chunk, not yet decoded."""
        with self._refusing("is damaged"):
            if self._parquet is None:
                batches: Iterable[Any] = [self._batches[index]]
            else:
                batches = self._parquet.iter_batches(batch_size=1024, row_groups=[index], columns=[self._field])
            for batch in batches:
                yield from self._raw(self._strings(batch))

    def rows_before(self, index: int) -> int:
        """Rows of all chunks before this one."""
        if self._parquet is None:
            return sum(batch.num_rows for batch in self._batches[:index])
        return sum(self._parquet.metadata.row_group(earlier).num_rows for earlier in range(index))

    def _strings(self, batch: pyarrow.RecordBatch) -> Any:
        column = batch.column(self._field)
        column.validate()  # that its buffers are as long as it says: what is mapped into memory has not been looked at
        return column

    def _raw(self, column: Any) -> Iterator[bytes | None]:
        """The bytes of each string, whose places are checked first: wrong ones would end the process."""
        if self._arrow.types.is_dictionary(column.type):
            places, strings = column.indices, self._bytes(column.dictionary)
            places.validate(full=True)
            for place in places:
                number = place.as_py()
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

    def _open_arrow(self, file: Path) -> tuple[list[pyarrow.RecordBatch], pyarrow.Schema]:
        """Record batches (not loaded: memory-mapped) of an Arrow stream, as `datasets` writes it, or of an Arrow
        file.
        """
        source = self._arrow.memory_map(str(file))
        if source.read(6) == b"ARROW1":
            reader = self._arrow.ipc.open_file(source)
            return [reader.get_batch(index) for index in range(reader.num_record_batches)], reader.schema
        source.seek(0)
        stream = self._arrow.ipc.open_stream(source)
        return list(stream), stream.schema

    def _check_column(self, schema: pyarrow.Schema, names: list[str]) -> None:
        if self._field not in names:
            raise DataError(
                f'{self._file} has no column "{self._field}" but {_short(", ".join(names))}: set '
                "the source's `text_field`"
            )
        kind = schema.field(self._field).type
        value = kind.value_type if self._arrow.types.is_dictionary(kind) else kind
        tests = (self._arrow.types.is_string, self._arrow.types.is_large_string)
        if not any(test(value) for test in tests):
            raise DataError(f'{self._file}: column "{self._field}" is {kind}, expected string')
