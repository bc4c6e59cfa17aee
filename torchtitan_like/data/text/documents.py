"""Documents in files: which files a path means, how they are cut into pieces of work, and the texts of a piece.

A piece is a pure description (file, range); reading it needs nothing else, so any process can read any piece. Documents
are numbered by file in the order of names, then by their place in the file; pieces keep that order.

Formats: *text*, a file is one document; *jsonl*, a line is a JSON object with the text in one field, blank lines
are skipped, and a file may be compressed with gzip; *parquet* and *arrow* (also a Hugging Face data set saved to disk), a
row is a document and a column holds the text. Text is UTF-8. Anything else is a bad record, which raises DataError with file
and line (or row), or is left out where that is asked for; so is what is behind a place where a gzip file is damaged. A file
that cannot be read as its format is always an error.
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import xxhash

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.text.formats import (
    BadRecord,
    Span,
    Table,
    estimated_text_bytes,
    gzip_span,
    is_gzip,
    num_gzip_spans,
    read_lines,
    read_table,
    read_text,
)
from torchtitan_like.data.text.hub import PREFIX, Listing, list_files, local_path

Format = Literal["text", "jsonl", "parquet", "arrow"]
OnBadRecord = Literal["error", "skip"]

ENDINGS: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
# Among a user's data the token cache is a hidden folder: globs and other readers of the data skip
# it. Earlier versions made
# a visible one, which is still found. Neither is ever taken for data.
CACHE_FOLDER_NAME = ".token_cache"
VISIBLE_CACHE_FOLDER_NAME = "token_cache"  # also the name of the cache in a run's own folder
CACHE_FOLDER_NAMES = (CACHE_FOLDER_NAME, VISIBLE_CACHE_FOLDER_NAME)

# Work is cut into pieces of about this size: one is read, tokenized and committed as a whole. A half-built token cache
# counts pieces, so cutting them differently needs another version.
PIECE_BYTES = 8 * 2**20
PIECES_VERSION = 2
# Lines are streamed in blocks of this size. Another one is another order: streaming.WINDOW_VERSION.
BLOCK_BYTES = 2 * 2**20
# A table that is not here yet is cut by its size into parts of this many bytes, whatever its row groups are.
TABLE_BYTES = 16 * 2**20
_READERS = 16  # files that are asked at once what is in them
_DATASET_MARKS = ("dataset_info.json", "state.json")


@dataclass(frozen=True)
class Corpus:
    """The files of one source, sorted. ``folder`` is the deepest one that holds them all.

    files: absolute paths. A source may have millions: a `Path` takes ten times as long to make.
    listing: of files that lie on the Hub, and here only once they are read (`Blocks`).
    """

    folder: Path
    files: tuple[str, ...]
    format: Format
    text_field: str
    on_bad_record: OnBadRecord = "error"
    listing: Listing | None = None

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else f"the {len(self.files)} files of {self.folder}"

    def relative_names(self) -> Iterator[str]:
        """The path of each file from ``folder``."""
        start = len(os.path.join(self.folder, ""))
        return (file[start:] for file in self.files)

    def size_and_time(self, file: str) -> tuple[int, int]:
        """Bytes, and nanoseconds of the last change; 0 for a file of the Hub, which does not change."""
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
    """The files that ``path`` (a file, a glob, a folder with all below it, or files of the Hub) means.

    downloads: a folder into which files of the Hub are downloaded when they are read; None: all of them, now, into the Hub's
    own cache. Raises DataError where there is none, or where the format cannot be told.
    """
    listing = None if downloads is None or not path.startswith(PREFIX) else list_files(path, downloads)
    files = _files_at(local_path(path), format_name) if listing is None else list(map(str, listing.sizes))
    found_format = _format_of(files) if format_name == "auto" else format_name
    folder = Path(os.path.commonpath({os.path.dirname(file) for file in files}))
    name: Any = found_format  # one of Format: checked by the schema
    return Corpus(folder, tuple(files), name, text_field, on_bad_record, listing)


def _files_at(path: str, format_name: str) -> list[str]:
    given = Path(path).expanduser()
    if given.is_file():
        files = [str(given.absolute())]
    elif given.is_dir():
        files = _files_below(given.absolute(), format_name)
    else:
        matches = set(matching(given))
        folders = {match.parent for match in matches}
        found = sorted(file for folder in folders for file in _listed_in(folder, matches))
        files = [str(file.absolute()) for file in found]
    if not given.is_file():
        files = _without_leftovers(files)
    if not files:
        what = "a folder without files of a known ending" if given.is_dir() else "not a file, folder or matching glob"
        raise DataError(
            f"no data at {path!r}: it is {what} (relative paths start at {os.getcwd()}; {_known_endings()})"
        )
    return files


def _listed_in(folder: Path, wanted: set[Path]) -> Iterator[Path]:
    """Those of some names that are files of ``folder``. The folder itself tells what they are: no file is asked."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (path := folder / entry.name) in wanted:
                if entry.is_symlink() and not path.exists():
                    raise _gone(path)
                if entry.is_file():
                    yield path


def matching(pattern: Path) -> list[Path]:
    """What a glob means: nothing in a token cache, unless it names one."""
    found = map(Path, glob.glob(str(pattern), recursive=True))
    names = set(CACHE_FOLDER_NAMES)
    return [path for path in found if names & {*pattern.parts} or not names & {*path.parts}]


def _without_leftovers(files: list[str]) -> list[str]:
    """Of each data set that `datasets` has saved, the files that it lists: others hold rows of an earlier one, or the same
    rows once more, as `map` keeps them there.
    """
    names = {folder: _listed(Path(folder)) for folder in {os.path.dirname(file) for file in files if _is_arrow(file)}}

    def is_listed(file: str) -> bool:
        folder, name = os.path.split(file)
        listed = names[folder]
        return listed is None or name in listed

    return [file for file in files if not _is_arrow(file) or is_listed(file)]


def _is_arrow(file: str) -> bool:
    return file.endswith(".arrow")


def _listed(folder: Path) -> list[str] | None:
    """Names of the files of the data set that is saved in ``folder``; None where there is none, or it does not tell."""
    if not all((folder / mark).exists() for mark in _DATASET_MARKS):
        return None
    try:
        state = json.loads((folder / _DATASET_MARKS[1]).read_text(encoding="utf-8"))
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError, ValueError):
        return None
    if missing := [name for name in names if not (folder / name).exists()]:
        raise DataError(f"{folder} lacks {missing[0]}, which its {_DATASET_MARKS[1]} lists: save or fetch it again")
    return names


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
    ends: number of the block behind the last of each file. Reads no text; of tables, what each file says of itself; of files
    of the Hub nothing: there each block is a part of its file, of as many as follow from its size.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        with ThreadPoolExecutor(_READERS) as pool:
            counts = list(pool.map(self._count, corpus.files))
        self.ends = list(accumulate(num_blocks for num_blocks, _ in counts))
        self.num_bytes = sum(num_bytes for _, num_bytes in counts)
        sizes = (corpus.size_and_time(file)[0] for file in corpus.files)
        names: list[object] = list(zip(corpus.relative_names(), sizes, strict=True))
        known_by = names if corpus.listing is None else [*names, corpus.listing.revision]
        self.identity = f"{len(names)} files, {xxhash.xxh3_64_hexdigest(json.dumps(known_by).encode())}"
        if not self.ends[-1]:
            raise DataError(f"no text in {corpus}")

    def _count(self, file: str) -> tuple[int, int]:
        """Blocks of a file, and about the bytes of its text."""
        corpus, size = self._corpus, self._corpus.size_and_time(file)[0]
        if corpus.format == "jsonl":
            packed = is_gzip(file) if corpus.listing is None else corpus.listing.is_gzip(Path(file))
            return (num_gzip_spans(size), estimated_text_bytes(size)) if packed else (-(-size // BLOCK_BYTES), size)
        if corpus.format == "text":
            return min(size, 1), size
        if corpus.listing is not None:
            return -(-size // TABLE_BYTES), 2 * size
        with Table(file, corpus.format, corpus.text_field) as table:
            sizes = table.sizes()
        return len(sizes), sum(sizes)

    def _whole(self, file: str) -> int:
        """Bytes of a file, or chunks of a table."""
        if self._corpus.format in ("text", "jsonl"):
            return os.stat(file).st_size
        with Table(file, self._corpus.format, self._corpus.text_field) as table:
            return len(table.sizes())

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> Span:
        """Without its size. A file of the Hub is here afterwards; raises DataError where it cannot be downloaded."""
        index = bisect_right(self.ends, number)
        file, first = self._corpus.files[index], self.ends[index - 1] if index else 0
        part, num_parts = number - first, self.ends[index] - first
        if self._corpus.listing is not None:
            self._corpus.listing.fetch(Path(file))
            whole = self._whole(file)
            return Span(file, whole * part // num_parts, whole * (part + 1) // num_parts, 0)
        if self._corpus.format == "jsonl" and is_gzip(file):
            return gzip_span(file, part, num_parts)
        step = BLOCK_BYTES if self._corpus.format == "jsonl" else 1
        return Span(file, part * step, (part + 1) * step, 0)


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
        return iter([read_text(span.file)])
    if corpus.format == "jsonl":
        return read_lines(span, corpus.text_field)
    return read_table(span, corpus.format, corpus.text_field)


def _files_below(folder: Path, format_name: str) -> list[str]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").exists())
        raise DataError(
            f"{folder} holds several splits ({', '.join(splits)}): give the path of one, as {folder / splits[0]}"
        )
    if format_name == "auto" and all((folder / mark).exists() for mark in _DATASET_MARKS):
        format_name = "arrow"
    names = ENDINGS.values() if format_name == "auto" else [ENDINGS[format_name]]
    return files_below(folder, tuple(ending for group in names for ending in group))


def files_below(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Files with these endings in ``folder`` and the folders in it, sorted by the parts of their
    paths; without hidden files and token caches. Links are followed, as they are in globs, but no
    folder is read twice.
    """
    found: list[str] = []
    seen, rest = set(), [os.fspath(folder)]
    while rest:
        parent = rest.pop()
        if (place := os.path.realpath(parent)) in seen:
            continue
        seen.add(place)
        folders = []
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:  # the folder itself tells what they are: no file is asked
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders += [entry.path] if entry.name not in CACHE_FOLDER_NAMES else []
                elif entry.name.endswith(endings):
                    if entry.is_symlink() and not os.path.exists(entry.path):
                        raise _gone(entry.path)
                    found.append(entry.path)
        rest += sorted(folders, reverse=True)
    # No name contains a NUL, and none sorts below it: a folder's files come before "folder-2".
    return sorted(found, key=lambda file: file.replace("/", "\0"))


def _gone(file: str | Path) -> DataError:
    return DataError(f"{file} is a link to a file that is not there: fetch it again, or remove the link")


def _known_endings() -> str:
    endings = "; ".join(f"{name}: {' '.join(endings)}" for name, endings in ENDINGS.items())
    return f'known endings: {endings}; files of token ids need format = "tokens"'


def _format_of(files: list[str]) -> str:
    found: dict[str, str] = {}
    for file in files:
        name = next((name for name, endings in ENDINGS.items() if file.endswith(endings)), None)
        if name is None:
            raise DataError(
                f"the format of {file} cannot be told by its ending ({_known_endings()}): set the source's `format`"
            )
        found.setdefault(name, file)
    if len(found) > 1:
        examples = ", ".join(f"{name} ({file})" for name, file in found.items())
        raise DataError(
            f"files of several formats in one source: {examples}; set the source's `format` or give a narrower path"
        )
    return next(iter(found))


def _spans(corpus: Corpus, file: str) -> Iterator[Span]:
    if corpus.format == "jsonl" and is_gzip(file):
        num_parts = num_gzip_spans(os.stat(file).st_size)
        yield from (gzip_span(file, part, num_parts) for part in range(num_parts))
        return
    if corpus.format in ("text", "jsonl"):
        size = os.stat(file).st_size
        step = PIECE_BYTES if corpus.format == "jsonl" else max(size, 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield Span(file, start, stop, stop - start)
        return
    with Table(file, corpus.format, corpus.text_field) as table:
        for index, size in enumerate(table.sizes()):
            yield Span(file, index, index + 1, size)
