"""A corpus as token ids on disk: a folder with one flat array and the offsets of documents.

| file | content |
| --- | --- |
| `tokens.bin` | all documents, with BOS and EOS as configured: uint16 or uint32, little-endian |
| `offsets.bin` | first token of each document, then number of tokens: uint64, little-endian |
| `tokens.bin.xxh3`, `offsets.bin.xxh3` | their hash tables (see `checked_file`) |
| `meta.json` | TokenMeta, the key that the folder was built for, and a digest of both |

A folder with these five files is complete. `Staging` writes it under another name and renames it at
the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import CacheWriteError, DataError
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    HashedWriter,
    HashTable,
    RawFile,
    as_table,
    hashed_stream,
    table_path,
)
from torchtitan_like.util.extents import HashedStream
from torchtitan_like.util.files import atomic_file, publish, sync_path, write_atomically
from torchtitan_like.util.reading import parse_json, read_text
from torchtitan_like.util.splitmix import mix64

if TYPE_CHECKING:
    from torchtitan_like.data.tokens.token_sources import TokenStream

TOKENS, OFFSETS, META = "tokens.bin", "offsets.bin", "meta.json"
CONTENT_KEYS = {"meta", "dtype", "key"}  # keys of meta.json, in addition to their digest
PROGRESS_SECONDS = 10.0  # between two log lines
FREE_SPACE = "free space or repair the disk, then start again"
_JOURNAL, _OWNER = "journal.jsonl", "owner"
OFFSET_TYPE = np.dtype("<u8")
# Bit of a token that is never a label. Only in files of a sample processor.
NOT_TRAINED = np.uint32(2**31)
# Key of meta.json in such files.
PROCESSOR = "processor"


@dataclass(frozen=True)
class TokenMeta:
    """Counts and digest of a token file.

    num_empty: skipped documents without tokens. text_bytes: bytes of UTF-8. text_digest: identifies
    the documents independently of files and tokenizer; the sum over documents
        of a hash of (number, text), modulo 2**64.
    num_bad: skipped bad records (data.on_bad_record).
    """

    num_tokens: int = 0
    num_documents: int = 0
    num_empty: int = 0
    text_bytes: int = 0
    max_id: int = 0
    text_digest: int = 0
    num_bad: int = 0


@dataclass(frozen=True)
class EncodedPiece:
    """Encoded documents.

    tokens: (num_tokens,).
    lengths: (num_documents,), number of tokens of each document.
    hashes: (num_documents,), uint64, hashes of the texts.
    first_bad: the first of ``num_bad`` bad records.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.uint64]
    hashes: NDArray[np.uint64]
    num_empty: int
    text_bytes: int
    num_bad: int = 0
    first_bad: str = ""


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a corpus. Both arrays are read on access.

    tokens: (num_tokens,); a TokenStream for files that another program tokenized.
    offsets: (num_documents + 1,), first token of each document, then the number of tokens.
    meta: for files of another program, only num_tokens, num_documents and text_digest are set.
    has_masks: `NOT_TRAINED` is set in tokens that are never labels.
    """

    folder: Path
    tokens: CheckedArray | TokenStream
    offsets: NDArray[np.uint64] | CheckedArray
    meta: TokenMeta
    has_masks: bool = False


def token_type(vocab_size: int, *, has_masks: bool = False) -> np.dtype[Any]:
    """Return the smallest dtype on disk for ids below ``vocab_size``, and for `NOT_TRAINED`."""
    return np.dtype("<u2" if vocab_size <= 2**16 and not has_masks else "<u4")


def without_marks(tokens: NDArray[Any]) -> NDArray[Any]:
    """Return token ids without `NOT_TRAINED`, for which 16 bits have no room."""
    return tokens & ~NOT_TRAINED if tokens.dtype.itemsize > 2 else tokens


def open_token_file(
    folder: Path, key: dict[str, Any], *, is_one_of_many: bool = False
) -> TokenFile | None:
    """Open a complete token file that was built for ``key``; None if it is missing.

    This takes milliseconds for any size.
    is_one_of_many: see `RawFile`. Raises DataError if the folder is damaged or has another key.
    """
    try:
        content = _content(folder)
    except FileNotFoundError:
        return None
    if content["key"] != key:
        raise _damaged(folder, "it was built from other data or with other settings")
    meta, dtype = _described(folder, content)
    files = {TOKENS: (dtype, meta.num_tokens), OFFSETS: (OFFSET_TYPE, meta.num_documents + 1)}
    for name, (kind, count) in files.items():
        path, size = folder / name, count * kind.itemsize
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,}"
            raise _damaged(folder, f"{name} should have {size:,} bytes and {state}")
    arrays = {
        name: CheckedArray(_checked(folder / name, is_one_of_many), kind, in_memory=name == OFFSETS)
        for name, (kind, _) in files.items()
    }
    offsets = arrays[OFFSETS]
    if (int(offsets[0]), int(offsets[-1])) != (0, meta.num_tokens):
        raise _damaged(folder, f"{OFFSETS} does not list {meta.num_documents:,} documents")
    return TokenFile(folder, arrays[TOKENS], offsets, meta, has_masks=PROCESSOR in key)


def _checked(path: Path, is_one_of_many: bool) -> CheckedFile:
    if not table_path(path).exists():
        raise _damaged(path.parent, f"{table_path(path).name} is missing")
    file = RawFile(path, is_one_of_many=is_one_of_many)
    remedy = f"delete the folder {path.parent}, and it is built again from its text"
    return CheckedFile(file, HashTable(file, remedy))


def _described(folder: Path, content: dict[str, Any]) -> tuple[TokenMeta, np.dtype[Any]]:
    try:
        if content["dtype"] not in ("<u2", "<u4"):
            raise TypeError(f"the dtype {content['dtype']!r}")
        if any(type(count) is not int or count < 0 for count in content["meta"].values()):
            raise TypeError("a count that is not an integer")
        return TokenMeta(**content["meta"]), np.dtype(content["dtype"])
    except TypeError as error:
        raise _damaged(folder, f"{META} does not describe a token file ({error})") from error


def key_of(folder: Path) -> dict[str, Any]:
    """Return the key of the token file in ``folder``. Raises DataError if it is damaged."""
    try:
        key: dict[str, Any] = _content(folder)["key"]
    except FileNotFoundError as error:
        raise _damaged(folder, f"{META} is missing") from error
    return key


def _content(folder: Path) -> dict[str, Any]:
    """Return the content of meta.json. Raises DataError if it is damaged."""
    try:
        content = parse_json(read_text(folder / META))
    except ValueError as error:
        raise _damaged(folder, f"{META} is not JSON ({error})") from error
    keys = set(content) if isinstance(content, dict) else set()
    if keys != CONTENT_KEYS | {"digest"}:
        expected = ", ".join(sorted(CONTENT_KEYS | {"digest"}))
        actual = f"the keys {', '.join(sorted(keys))}" if keys else "no keys"
        raise _damaged(folder, f"{META} has {actual}, expected {expected}")
    if content["digest"] != _digest(content):
        problem = f"{META} has the digest {content['digest']}, expected {_digest(content)}"
        raise _damaged(folder, problem)
    if not isinstance(content["key"], dict) or not isinstance(content["meta"], dict):
        raise _damaged(folder, f"{META} does not describe a token file")
    return dict(content)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps({name: content[name] for name in sorted(CONTENT_KEYS)}, sort_keys=True)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def _write_content(folder: Path, content: dict[str, Any]) -> None:
    unfinished = folder / f".{META}.building"
    text = json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
    write_atomically(folder / META, text, unfinished)


def _damaged(folder: Path, problem: str) -> DataError:
    return DataError(
        f"the token cache {folder} is damaged: {problem}. Delete the folder, and it is built again "
        "from its text"
    )


class StagingTaken(DataError):
    """Another node writes the same token file as this process."""


class Staging:
    """A token file that is written piece by piece. Committed pieces survive a kill.

    Each piece is appended and synced to disk, then recorded by a line of the journal. Opening
    truncates the files to the last recorded piece. Only the holder of the build's lock may open it.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._dtype = dtype
        # File locks may not work between the nodes of a shared file system. The last node to open
        # the folder owns it; the other one detects that in `_commit`.
        self._token = uuid.uuid4().hex
        (folder / _OWNER).write_text(self._token)
        self.num_pieces, self.meta, tails = self._last_commit()
        self._tokens = HashedWriter(folder / TOKENS, self.meta.num_tokens * dtype.itemsize)
        # Truncating a new, empty file to one entry writes the first offset, 0.
        offsets_size = (self.meta.num_documents + 1) * OFFSET_TYPE.itemsize
        self._offsets = HashedWriter(folder / OFFSETS, offsets_size)
        if tails and tails != self._tails():
            self.close()
            raise _damaged(folder, "the files of an unfinished build have changed")
        self._journal = (folder / _JOURNAL).open("ab", buffering=0)

    def append(self, piece: EncodedPiece) -> None:
        """Write and commit the next piece."""
        ends = np.cumsum(piece.lengths, dtype=np.uint64) + np.uint64(self.meta.num_tokens)
        self._tokens.write(piece.tokens.astype(self._dtype, copy=False))
        self._offsets.write(ends.astype(OFFSET_TYPE, copy=False))
        self.meta = _extended(self.meta, piece)
        self.num_pieces += 1
        self._commit()

    def publish(self, folder: Path, key: dict[str, Any]) -> None:
        """Complete the token file and rename its folder to ``folder``."""
        self._tokens.finish()
        self._offsets.finish()
        content = {"meta": dataclasses.asdict(self.meta), "dtype": self._dtype.str, "key": key}
        _write_content(self._folder, content)
        self.close()
        for name in (_JOURNAL, _OWNER):
            (self._folder / name).unlink()
        sync_path(self._folder)
        publish(self._folder, folder)

    def discard(self) -> None:
        """Delete the folder."""
        self.close()
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Close the files. A later process can continue after the committed pieces."""
        for stream in (self._tokens, self._offsets, self._journal):
            stream.close()

    def _tails(self) -> list[int]:
        return [self._tokens.tail_digest(), self._offsets.tail_digest()]

    def _last_commit(self) -> tuple[int, TokenMeta, list[int]]:
        journal = self._folder / _JOURNAL
        journal.touch()
        raw = journal.read_bytes()
        num_complete = raw.rfind(b"\n") + 1  # a kill may have truncated the last line
        os.truncate(journal, num_complete)
        lines = raw[:num_complete].splitlines()
        if not lines:
            return 0, TokenMeta(), []
        try:
            row = json.loads(lines[-1])
            tails = [int(tail) for tail in row["tails"]]
            return int(row["num_pieces"]), TokenMeta(**row["meta"]), tails
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._folder, f"{_JOURNAL} cannot be read ({error!r})") from error

    def _commit(self) -> None:
        self._tokens.sync()
        self._offsets.sync()
        owner = self._folder / _OWNER
        if not owner.exists() or owner.read_text() != self._token:
            raise StagingTaken(
                f"another node also builds the token cache in {self._folder.parent}, and file "
                "locks do not work between the nodes. Expected one builder: set data.cache_folder "
                "to a folder on a local disk of each node, or start again after the other node has "
                "finished"
            )
        row = {
            "num_pieces": self.num_pieces,
            "meta": dataclasses.asdict(self.meta),
            "tails": self._tails(),
        }
        self._journal.write(json.dumps(row).encode() + b"\n")
        os.fsync(self._journal.fileno())


def _extended(meta: TokenMeta, piece: EncodedPiece) -> TokenMeta:
    numbers = np.arange(meta.num_documents, meta.num_documents + len(piece.hashes), dtype=np.uint64)
    digest = int(mix64(piece.hashes ^ mix64(numbers)).sum(dtype=np.uint64))
    return TokenMeta(
        num_tokens=meta.num_tokens + len(piece.tokens),
        num_documents=meta.num_documents + len(piece.lengths),
        num_empty=meta.num_empty + piece.num_empty,
        text_bytes=meta.text_bytes + piece.text_bytes,
        max_id=max(meta.max_id, int(without_marks(piece.tokens).max(initial=0))),
        text_digest=(meta.text_digest + digest) % 2**64,
        num_bad=meta.num_bad + piece.num_bad,
    )


@contextmanager
def written_atomically(path: Path, description: str) -> Iterator[BinaryIO]:
    """Open a file that is renamed to ``path`` when it is complete.

    One process of a node at a time may call it. Without file locks between nodes, each node writes
    a separate unfinished file. A new call overwrites the file of a killed process. Raises
    CacheWriteError with ``description`` if the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}.building")
    try:
        with atomic_file(path, unfinished) as stream:
            yield stream
    except OSError as error:
        raise CacheWriteError(
            f"cannot write {description} {path}: {error}; {FREE_SPACE}"
        ) from error


@contextmanager
def written_with_hashes(path: Path, description: str) -> Iterator[HashedStream]:
    """Open a file like `written_atomically`, and write its hash table next to it."""
    with written_atomically(path, description) as file:
        stream = hashed_stream(file)
        yield stream
        with written_atomically(table_path(path), f"the hash table of {description}") as table:
            table.write(as_table(stream.finish()))
