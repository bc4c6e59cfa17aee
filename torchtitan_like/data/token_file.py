"""A corpus as token ids on disk: one flat array, the places where documents begin, and what is known of both.

    tokens.bin    uint16 or uint32, little-endian: the documents in order, each with BOS and EOS where asked for
    offsets.bin   uint64, little-endian: where each document begins, and the number of tokens at the end
    meta.json     TokenMeta, and the key the folder was built for

A folder with these three is complete: it is written under another name (see `Staging`) and renamed when it is.
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
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .order import mix64
from .token_stream import Tokens

TOKENS, OFFSETS, META = "tokens.bin", "offsets.bin", "meta.json"
_JOURNAL, _OWNER = "journal.jsonl", "owner"
OFFSET_TYPE = np.dtype("<u8")


@dataclass(frozen=True)
class TokenMeta:
    """What is known of a token file.

    text_digest: identifies the documents, whatever files they came from and whatever the tokenizer: the sum over
    documents of a hash of (number, text) mod 2**64. num_empty: documents that gave no token and were left out.
    text_bytes: UTF-8. num_bad: records that are no text and were left out (data.on_bad_record).
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
    """Documents as tokens.

    tokens: (num_tokens,); lengths: (num_documents,), tokens of each; hashes: (num_documents,), uint64, of the texts.
    first_bad: the first of ``num_bad`` records that are no text.
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
    """tokens: (num_tokens,) memory-mapped; offsets: (num_documents + 1,) memory-mapped.

    Of files that were tokenised elsewhere: tokens are a TokenStream; of meta, only the counts and text_digest are known.
    """

    folder: Path
    tokens: Tokens
    offsets: NDArray[np.uint64]
    meta: TokenMeta


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest type on disk for ids below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def open_token_file(folder: Path, key: dict[str, Any]) -> TokenFile | None:
    """Open a complete token file that was built for ``key``; None where there is none.

    Takes milliseconds, whatever the size. Raises DataError where the folder is there but is not what it should be.
    """
    try:
        content = _content(folder)
    except FileNotFoundError:
        return None
    if content.get("key") != key:
        raise _damaged(folder, "it was built for something else")
    meta = TokenMeta(**content["meta"])
    dtype = np.dtype(content["dtype"])
    expected = {TOKENS: meta.num_tokens * dtype.itemsize, OFFSETS: (meta.num_documents + 1) * OFFSET_TYPE.itemsize}
    for name, size in expected.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            raise _damaged(
                folder, f"{name} should have {size:,} bytes and {'is missing' if found is None else f'has {found:,}'}"
            )
    offsets = map_file(folder / OFFSETS, OFFSET_TYPE)
    seen = offsets if len(offsets) <= 2**20 else offsets[np.linspace(0, meta.num_documents, 2**10).astype(np.int64)]
    if int(seen[0]) or int(seen[-1]) != meta.num_tokens or (seen[1:] <= seen[:-1]).any():
        raise _damaged(folder, f"{OFFSETS} does not list where {meta.num_documents:,} documents begin")
    return TokenFile(folder, map_file(folder / TOKENS, dtype), offsets, meta)


def key_of(folder: Path) -> dict[str, Any]:
    """What the token file in ``folder`` was built for. Raises DataError where that cannot be read."""
    try:
        key: dict[str, Any] = _content(folder)["key"]
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{META} does not tell what it was built for ({error!r})") from error
    return key


def _content(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(folder, f"{META} is not JSON ({error})") from error
    return content


def map_file(file: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None) -> NDArray[Any]:
    """``count`` (None: all) values of ``dtype`` from byte ``offset`` on, memory-mapped, read-only."""
    if not file.stat().st_size:  # cannot be mapped
        return np.empty(0, dtype)
    # A view as plain array: np.memmap's own indexing costs several microseconds. Of a Path it would look at each folder.
    return np.memmap(os.fspath(file), dtype=dtype, mode="r", offset=offset, shape=count).view(np.ndarray)


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(f"the token cache {folder} is damaged: {why}; delete the folder, it is built again from its text")


class StagingTaken(DataError):
    """Another node writes the token file that this process was writing."""


class Staging:
    """A token file that is being written, piece by piece; what was committed survives a kill.

    Each piece is appended and synced to disk before a line of the journal says so; opening cuts the files back to the
    last such line. Only the holder of the build's lock may open one.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._dtype = folder, dtype
        # The lock may not reach across the nodes of a shared file system: whoever comes later takes the folder
        # over, and the other one finds out here.
        self._token = uuid.uuid4().hex
        (folder / _OWNER).write_text(self._token)
        self.num_pieces, self.meta = self._last_commit()
        self._tokens = self._open(TOKENS, self.meta.num_tokens * dtype.itemsize)
        self._offsets = self._open(OFFSETS, (self.meta.num_documents + 1) * OFFSET_TYPE.itemsize)
        self._journal = (folder / _JOURNAL).open("ab", buffering=0)

    def append(self, piece: EncodedPiece) -> None:
        """Write and commit the next piece."""
        ends = np.cumsum(piece.lengths, dtype=np.uint64) + np.uint64(self.meta.num_tokens)
        _write(self._tokens, piece.tokens.astype(self._dtype, copy=False))
        _write(self._offsets, ends.astype(OFFSET_TYPE, copy=False))
        self.meta = _extended(self.meta, piece)
        self.num_pieces += 1
        self._commit()

    def publish(self, folder: Path, key: dict[str, Any]) -> None:
        """Make the token file visible, complete, as ``folder``."""
        content = {"meta": dataclasses.asdict(self.meta), "dtype": self._dtype.str, "key": key}
        (self._folder / META).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        sync(self._folder / META)
        self.close()
        for name in (_JOURNAL, _OWNER):
            (self._folder / name).unlink()
        sync(self._folder)
        self._folder.rename(folder)
        sync(folder.parent)

    def discard(self) -> None:
        """Remove all that was written."""
        self.close()
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Leave what is committed for a later process."""
        for stream in (self._tokens, self._offsets, self._journal):
            stream.close()

    def _last_commit(self) -> tuple[int, TokenMeta]:
        journal = self._folder / _JOURNAL
        journal.touch()
        raw = journal.read_bytes()
        complete = raw.rfind(b"\n") + 1  # a line without its newline was cut by a kill
        os.truncate(journal, complete)
        lines = raw[:complete].splitlines()
        if not lines:
            return 0, TokenMeta()
        row = json.loads(lines[-1])
        return int(row["num_pieces"]), TokenMeta(**row["meta"])

    def _open(self, name: str, size: int) -> FileIO:
        (self._folder / name).touch()
        # Not in append mode: should another node write the same file, it writes the same bytes at the same places.
        stream = (self._folder / name).open("r+b", buffering=0)
        stream.truncate(size)  # an offsets file that is made here gets its first entry, 0, by being lengthened
        stream.seek(size)
        return stream

    def _commit(self) -> None:
        for stream in (self._tokens, self._offsets):
            os.fsync(stream.fileno())
        owner = self._folder / _OWNER
        if not owner.exists() or owner.read_text() != self._token:
            raise StagingTaken(
                f"another node builds the token cache in {self._folder.parent} too, and file locks do not reach it: "
                "set data.cache_folder to a folder on a disk of each node, or start again when the other has finished"
            )
        row = {"num_pieces": self.num_pieces, "meta": dataclasses.asdict(self.meta)}
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
        max_id=max(meta.max_id, int(piece.tokens.max(initial=0))),
        text_digest=(meta.text_digest + digest) % 2**64,
        num_bad=meta.num_bad + piece.num_bad,
    )


def _write(stream: FileIO, array: NDArray[Any]) -> None:
    rest = array.view(np.uint8).data
    while len(rest):
        rest = rest[stream.write(rest) :]


@contextmanager
def written_whole(path: Path, what: str) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all; DataError, with ``what`` it is, where it cannot be written.

    For one process of a node at a time; where locks do not reach across nodes, each writes a file of its own. What a kill
    leaves behind is written over by the next one.
    """
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}.building")
    try:
        with unfinished.open("wb") as stream:
            yield stream
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise DataError(f"{what} {path} was not written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
