"""Divide a corpus into pieces of work, and read the documents of a piece.

A piece is a description (file, range). Any process can read any piece. Documents are numbered in
the order of file names, then in file order. Pieces keep that order.

Formats (text is UTF-8):

- *text*: a file is one document.
- *jsonl*: a line is a JSON object with the text in one field. Blank lines are skipped. A file may
  be compressed with gzip or zstd.
- *parquet* and *arrow* (also a Hugging Face dataset saved to disk): a row is a document, and one
  column has the text.
- the name of a data source of user code, "module:name": its documents are text, or records with
  the text in one field.

A record without valid text is a bad record, and so is the part of a compressed file after a damaged byte.
It raises DataError with file and line (or row), or is skipped (`data.on_bad_record`). A file of
another format is always an error.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.file_lists import find_files, format_of
from torchtitan_like.data.text.formats import (
    NoDocument,
    Span,
    Table,
    abbreviate,
    compressed_span,
    estimated_text_bytes,
    is_compressed,
    line_number,
    num_compressed_spans,
    read_lines,
    read_text,
)
from torchtitan_like.data.text.hub import PREFIX, Listing, list_files, local_path
from torchtitan_like.data.text.user_documents import (
    Document,
    UserDocuments,
    UserProcessor,
    check_text,
)

OnBadRecord = Literal["error", "skip"]

# Approximate size of a piece, which is read, tokenized and committed as a whole. An unfinished
# token cache counts pieces: increase the version with any change of their boundaries.
PIECE_BYTES = 8 * 2**20
PIECES_VERSION = 3
# Size of a block of lines. With any change, increase streaming.WINDOW_VERSION and PIECES_VERSION.
BLOCK_BYTES = 2 * 2**20
# A table that is not downloaded yet is divided into parts of this many bytes, not into row groups.
TABLE_BYTES = 16 * 2**20
# Documents of a data source of user code in a block, and the estimate of their size.
BLOCK_DOCUMENTS = 512
DOCUMENT_BYTES = 4096
_NUM_THREADS = 16  # that read the metadata of files
_UNITS: dict[str, Literal["byte", "row"]] = {"text": "byte", "jsonl": "byte"}  # else "row"


class Record(NamedTuple):
    """A record of a corpus, with its document, or with the problem of a record without one.

    offset: for "byte" the offset of the invalid byte (text) or of the line (jsonl), from 0; for
    "row" the row number, from 1.
    """

    file: str
    unit: Literal["byte", "row"]
    offset: int
    document: Document | None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.offset:,}: {self.problem}"

    def without_document(self, problem: str) -> Record:
        """Return the record as a bad one."""
        return self._replace(document=None, problem=problem)

    def error(self) -> DataError:
        """Return the error of a bad record. For text and jsonl it counts lines up to the offset."""
        where = (
            f"row {self.offset}"
            if self.unit == "row"
            else f"line {line_number(self.file, self.offset)}"
        )
        return DataError(
            f"{self.file}, {where}: {self.problem} "
            '(data.on_bad_record = "skip" leaves such records out)'
        )


@dataclass(frozen=True)
class Corpus:
    """The files of one source, sorted.

    folder: the deepest folder that contains all files. files: absolute paths, as strings: a source
    may have millions, and a `Path` is ten times as slow.
    format: a key of `ENDINGS`, or the name of a data source of user code.
    listing: the files on the Hub, which are downloaded when they are read (`Blocks`).
    documents: of a data source of user code; `files` then has one name, which is no file.
    processor: turns records into documents; None: `text_field` of a record is its text.
    """

    folder: Path
    files: tuple[str, ...]
    format: str
    text_field: str
    on_bad_record: OnBadRecord = "error"
    listing: Listing | None = None
    documents: UserDocuments | None = None
    processor: UserProcessor | None = None

    @property
    def runs_user_code(self) -> bool:
        return self.documents is not None or self.processor is not None

    def __str__(self) -> str:
        if self.documents is not None:
            return str(self.documents)
        if len(self.files) == 1:
            return self.files[0]
        return f"the {len(self.files)} files of {self.folder}"

    @property
    def table_column(self) -> str | None:
        """The column of a table to read; None: all, for a sample processor."""
        return self.text_field if self.processor is None else None

    def relative_names(self) -> Iterator[str]:
        """Return the path of each file relative to ``folder``."""
        start = len(os.path.join(self.folder, ""))
        return (file[start:] for file in self.files)

    def size_and_time(self, file: str) -> tuple[int, int]:
        """Return size in bytes and modification time in nanoseconds (0 for a file of the Hub).

        The size of a data source of user code is its number of documents.
        """
        if self.documents is not None:
            return len(self.documents), 0
        if self.listing is not None:
            return self.listing.sizes[Path(file)], 0
        status = os.stat(file)
        return status.st_size, status.st_mtime_ns


Piece = tuple[Span, ...]


def find_corpus(
    path: str,
    format_name: str = "auto",
    text_field: str = "text",
    on_bad_record: OnBadRecord = "error",
    downloads: Path | None = None,
) -> Corpus:
    """Return the corpus of ``path``: a file, a glob, a folder with its sub-folders, or Hub files.

    downloads: a folder into which files of the Hub are downloaded when they are read; None: all
    files are downloaded now, into the Hub's cache. Raises DataError if there are no files, or if
    their format is unknown.
    """
    listing = None
    if downloads is not None and path.startswith(PREFIX):
        listing = list_files(path, downloads)
    if listing is None:
        files = find_files(local_path(path), format_name)
    else:
        files = list(map(str, listing.sizes))
    folder = Path(os.path.commonpath({os.path.dirname(file) for file in files}))
    name = format_of(files) if format_name == "auto" else format_name
    return Corpus(folder, tuple(files), name, text_field, on_bad_record, listing)


def user_corpus(
    name: str,
    path: str,
    text_field: str,
    on_bad_record: OnBadRecord,
    settings: Mapping[str, Any],
    dump_folder: str,
) -> Corpus:
    """Return the documents of the data source `name` of user code.

    Its token cache is next to `path`, if that exists, else in the run's folder.
    """
    location = Path(path)
    folder = location if location.is_dir() else location.parent
    folder = (folder if location.exists() else Path(dump_folder)).absolute()
    documents = UserDocuments(name, path, settings)
    files = (str(folder / name),)
    return Corpus(folder, files, name, text_field, on_bad_record, documents=documents)


class Blocks:
    """The corpus in blocks with consecutive numbers.

    A block is a range of lines, a row group, a record batch, or a whole file of text. On the Hub it
    is one of a number of equal parts of a file, which follows from the file's size.

    num_bytes: estimated bytes of text in all blocks.
    ends: for each file, the number of the block after its last one.

    The constructor reads no text. It reads the metadata of local tables.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            counts = list(pool.map(self._count, corpus.files))
        self.ends = list(accumulate(num_blocks for num_blocks, _ in counts))
        self._file_bytes = [num_bytes for _, num_bytes in counts]
        self.num_bytes = sum(self._file_bytes)
        if not self.ends[-1]:
            raise DataError(f"no text in {corpus}. Expected documents: check the path")

    @cached_property
    def identity(self) -> str:
        """The number of the files, and a hash of their names and sizes."""
        corpus = self._corpus
        sizes = (corpus.size_and_time(file)[0] for file in corpus.files)
        names: list[object] = list(zip(corpus.relative_names(), sizes, strict=True))
        key = names if corpus.listing is None else [*names, corpus.listing.revision]
        if corpus.documents is not None:
            key = [*names, corpus.documents.fingerprint]
        digest = xxhash.xxh3_64_hexdigest(json.dumps(key).encode())
        return f"{len(names)} files, {digest}"

    def _count(self, file: str) -> tuple[int, int]:
        """Return the number of blocks of a file, and the estimated bytes of its text."""
        corpus, size = self._corpus, self._corpus.size_and_time(file)[0]
        if corpus.documents is not None:
            return -(-size // BLOCK_DOCUMENTS), size * DOCUMENT_BYTES
        if corpus.format == "jsonl":
            name = file if corpus.listing is None else corpus.listing.name_of(Path(file))
            if is_compressed(name):
                return num_compressed_spans(name, size), estimated_text_bytes(name, size)
            return -(-size // BLOCK_BYTES), size
        if corpus.format == "text":
            return min(size, 1), size
        if corpus.listing is not None:
            return -(-size // TABLE_BYTES), 2 * size
        with Table(file, corpus.format, corpus.table_column) as table:
            sizes = table.sizes()
        return len(sizes), sum(sizes)

    def _length(self, file: str) -> int:
        """Return the bytes of a file, or the number of chunks of a table."""
        if self._corpus.format in ("text", "jsonl"):
            return os.stat(file).st_size
        with Table(file, self._corpus.format, self._corpus.table_column) as table:
            return len(table.sizes())

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> Span:
        """Return a block. A file of the Hub is downloaded first.

        Raises DataError if the download fails.
        """
        corpus = self._corpus
        index = bisect_right(self.ends, number)
        file = corpus.files[index]
        first = self.ends[index - 1] if index else 0
        part, num_parts = number - first, self.ends[index] - first
        size = self._file_bytes[index] // num_parts
        if corpus.listing is not None:
            corpus.listing.fetch(Path(file))
            length = self._length(file)
            return Span(file, length * part // num_parts, length * (part + 1) // num_parts, size)
        if corpus.format == "jsonl" and is_compressed(file):
            return compressed_span(file, part, num_parts)
        if corpus.documents is not None:
            first = part * BLOCK_DOCUMENTS
            stop = min(first + BLOCK_DOCUMENTS, len(corpus.documents))
            return Span(file, first, stop, (stop - first) * DOCUMENT_BYTES)
        step = BLOCK_BYTES if corpus.format == "jsonl" else 1
        return Span(file, part * step, (part + 1) * step, size)


def plan_pieces(corpus: Corpus) -> list[Piece]:
    """Join the blocks to pieces of about ``PIECE_BYTES``. Small files share a piece."""
    pieces: list[Piece] = []
    current: list[Span] = []
    size = 0
    blocks = Blocks(corpus)
    for span in map(blocks.__getitem__, range(len(blocks))):
        if current and size + span.size > PIECE_BYTES:
            pieces.append(tuple(current))
            current, size = [], 0
        size += span.size
        if current and current[-1].file == span.file:
            span = Span(span.file, current[-1].start, span.stop, current.pop().size + span.size)
        current.append(span)
    return [*pieces, tuple(current)]


def piece_size(piece: Iterable[Span]) -> int:
    """Return the estimated bytes of text of a piece."""
    return sum(span.size for span in piece)


def read_piece(corpus: Corpus, piece: Iterable[Span]) -> Iterator[Record]:
    """Yield the records of ``piece`` in order; also bad records, if ``on_bad_record`` is "skip".

    Raises DataError, with file and line (or row), for other bad records, and for a file of another
    format.
    """
    for span in piece:
        for record in _records(corpus, span):
            if record.document is None and corpus.on_bad_record == "error":
                raise record.error()
            yield record


def _records(corpus: Corpus, span: Span) -> Iterator[Record]:
    name, unit = span.file, _UNITS.get(corpus.format, "row")
    if corpus.documents is not None:
        name = str(corpus.documents)
    for offset, content in _contents(corpus, span):
        try:
            yield Record(name, unit, offset, _document_of(corpus, content))
        except NoDocument as error:
            yield Record(name, unit, offset, None, str(error))


def _contents(corpus: Corpus, span: Span) -> Iterator[tuple[int, Any]]:
    if corpus.documents is not None:
        yield from enumerate(corpus.documents.read(span.start, span.stop), span.start + 1)
    elif corpus.format == "text":
        yield read_text(span.file)
    elif corpus.format == "jsonl":
        yield from read_lines(span)
    else:
        with Table(span.file, corpus.format, corpus.table_column) as table:
            for chunk in range(span.start, span.stop):
                yield from table.rows(chunk)


def _document_of(corpus: Corpus, content: Any) -> Document:
    """Return the document of a text or of a record. Raises NoDocument."""
    if isinstance(content, NoDocument):
        raise content
    if corpus.processor is not None:
        return corpus.processor(content if isinstance(content, Mapping) else {"text": content})
    field = ""
    if isinstance(content, Mapping):
        field = f'"{corpus.text_field}"'
        if corpus.text_field not in content:
            names = abbreviate(", ".join(map(repr, content)) or "none")
            raise NoDocument(f"no field {field} among {names} (set the source's `text_field`)")
        content = content[corpus.text_field]
    if not isinstance(content, str):
        value = abbreviate(json.dumps(content, default=repr), 40)
        raise NoDocument(f"{field or 'it'} is {value}, expected text")
    check_text(content)
    return content
