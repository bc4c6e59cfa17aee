"""A corpus as token ids on disk: one flat array, the places where documents begin, and what is known of both.

    tokens.bin         uint16 or uint32, little-endian: the documents in order, each with BOS and
    EOS where asked for
    offsets.bin        uint64, little-endian: where each document begins, and the number of tokens
    at the end
    tokens.bin.xxh3    hash table of tokens.bin (see `checked_file`)
    offsets.bin.xxh3   hash table of offsets.bin
    meta.json          TokenMeta, the key the folder was built for, and a digest of both

A folder with these five is complete: it is written under another name (see `Staging`) and renamed
when it is. Folders of
earlier versions have no hashes: these are computed once, when the folder is opened (`_add_hashes`).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.errors import CacheWriteError, DataError
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    ExtentHasher,
    HashedWriter,
    HashTable,
    RawFile,
    table_path,
)
from torchtitan_like.data.tokens.token_stream import Tokens
from torchtitan_like.util.file_lock import file_lock
from torchtitan_like.util.files import atomic_file, sync_path, write_atomically
from torchtitan_like.util.splitmix import mix64

logger = logging.getLogger()

TOKENS, OFFSETS, META = "tokens.bin", "offsets.bin", "meta.json"
CONTENT_KEYS = {"meta", "dtype", "key"}  # of meta.json, next to the digest of their values
COPY_BYTES = 2**24
CHUNK = 2**22  # offsets
PROGRESS_SECONDS = 10.0
FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
FREE_SPACE = "free space or repair the disk, then start again"
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
    """tokens: (num_tokens,); offsets: (num_documents + 1,), where each document begins. Both are
    read when they are used.

    Of files that were tokenized elsewhere: tokens are a TokenStream; of meta, only the counts and text_digest are known.
    """

    folder: Path
    tokens: Tokens
    offsets: NDArray[np.uint64] | CheckedArray
    meta: TokenMeta


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest type on disk for ids below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def open_token_file(folder: Path, key: dict[str, Any], *, is_one_of_many: bool = False) -> TokenFile | None:
    """Open a complete token file that was built for ``key``; None where there is none.

    Takes milliseconds, whatever the size, except for a folder of an earlier version.
    ``is_one_of_many``: see `CheckedFile`.
    Raises DataError where the folder is there but is not what it should be.
    """
    try:
        content = _content(folder)
    except FileNotFoundError:
        return None
    if content["key"] != key:
        raise _damaged(folder, "it was built for something else")
    meta, dtype = _described(folder, content)
    files = {TOKENS: (dtype, meta.num_tokens), OFFSETS: (OFFSET_TYPE, meta.num_documents + 1)}
    for name, (kind, count) in files.items():
        path, size = folder / name, count * kind.itemsize
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,}"
            raise _damaged(folder, f"{name} should have {size:,} bytes and {state}")
    is_hashed = "digest" in content or _add_hashes(folder, content, meta)
    arrays = {
        name: CheckedArray(
            _checked(folder / name, is_hashed, is_one_of_many), kind, in_memory=name == OFFSETS
        )
        for name, (kind, _) in files.items()
    }
    offsets = arrays[OFFSETS]
    if (int(offsets[0]), int(offsets[-1])) != (0, meta.num_tokens):
        raise _damaged(folder, f"{OFFSETS} does not list where {meta.num_documents:,} documents begin")
    return TokenFile(folder, arrays[TOKENS], offsets, meta)


def _checked(path: Path, is_hashed: bool, is_one_of_many: bool) -> CheckedFile:
    if is_hashed and not table_path(path).exists():
        raise _damaged(path.parent, f"{table_path(path).name} is missing")
    file = RawFile(path, is_one_of_many=is_one_of_many)
    remedy = f"delete the folder {path.parent}, it is built again from its text"
    return CheckedFile(file, HashTable(file, remedy) if is_hashed else None)


def _described(folder: Path, content: dict[str, Any]) -> tuple[TokenMeta, np.dtype[Any]]:
    try:
        return TokenMeta(**content["meta"]), np.dtype(content["dtype"])
    except TypeError as error:
        raise _damaged(folder, f"{META} describes no token file ({error})") from error


def key_of(folder: Path) -> dict[str, Any]:
    """What the token file in ``folder`` was built for. Raises DataError where that cannot be read."""
    try:
        key: dict[str, Any] = _content(folder)["key"]
    except FileNotFoundError as error:
        raise _damaged(folder, f"{META} is missing") from error
    return key


def _content(folder: Path) -> dict[str, Any]:
    """What meta.json says, with "digest" unless an earlier version wrote it. Raises DataError
    where it is damaged."""
    try:
        content = json.loads((folder / META).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{META} is not JSON ({error})") from error
    keys = set(content) if isinstance(content, dict) else set()
    if keys != CONTENT_KEYS and keys != CONTENT_KEYS | {"digest"}:
        expected = ", ".join(sorted(CONTENT_KEYS | {"digest"}))
        raise _damaged(folder, f"{META} has the keys {', '.join(sorted(keys)) or 'of no object'}, expected {expected}")
    if "digest" in keys and content["digest"] != _digest(content):
        raise _damaged(folder, f"{META} has the digest {content['digest']}, expected {_digest(content)}")
    if not isinstance(content["key"], dict) or not isinstance(content["meta"], dict):
        raise _damaged(folder, f"{META} describes no token file")
    return dict(content)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps({name: content[name] for name in sorted(CONTENT_KEYS)}, sort_keys=True)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def _write_content(folder: Path, content: dict[str, Any]) -> None:
    unfinished = folder / f".{META}.building"
    text = json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
    write_atomically(folder / META, text, unfinished)


def _add_hashes(folder: Path, content: dict[str, Any], meta: TokenMeta) -> bool:
    """Hash a folder of an earlier version, under a lock; False, and a warning, where nothing can
    be written there."""
    try:
        with (folder / ".hashes.lock").open("w") as lock, file_lock(lock):
            if "digest" not in _content(folder):  # another process may have hashed it meanwhile
                _check_offsets(folder, meta)
                for name in (TOKENS, OFFSETS):
                    _hash_file(folder / name)
                _write_content(folder, content)
        (folder / ".hashes.lock").unlink(missing_ok=True)
    except OSError as error:
        if error.errno in FULL_OR_FAILING:
            raise CacheWriteError(
                f"cannot write the hashes of the token cache {folder}: {error}; {FREE_SPACE}"
            ) from error
        logger.warning(
            f"the token cache {folder} was made by an earlier version and has no hashes, and none can be written there "
            f"({error}): its tokens are read without verification; make it again, or make the folder writable once"
        )
        return False
    return True


def _hash_file(path: Path) -> None:
    """Write the hash table of ``path``, as its bytes are now."""
    size, done, last_line = path.stat().st_size, 0, time.monotonic()
    logger.info(f"hashing {path}, {size / 2**20:,.1f} MiB: an earlier version made it without hashes")
    hasher = ExtentHasher()
    with path.open("rb") as source, written_whole(table_path(path), "the hash table") as table:
        while data := source.read(COPY_BYTES):
            table.write(hasher.update(data))
            done += len(data)
            if time.monotonic() - last_line > PROGRESS_SECONDS:
                last_line = time.monotonic()
                logger.info(f"hashing {path}: {100 * done / size:.0f}%")
        table.write(hasher.finish())


def _check_offsets(folder: Path, meta: TokenMeta) -> None:
    """Raise DataError unless the offsets of a folder of an earlier version rise."""
    offsets = CheckedArray(CheckedFile(RawFile(folder / OFFSETS)), OFFSET_TYPE)
    for low in range(0, meta.num_documents, CHUNK):
        chunk = offsets[low : low + CHUNK + 1]
        if (chunk[1:] <= chunk[:-1]).any():
            raise _damaged(folder, f"{OFFSETS} does not list where {meta.num_documents:,} documents begin")


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
        self.num_pieces, self.meta, tails = self._last_commit()
        # An offsets file that is made here gets its first entry, 0, by being lengthened.
        self._tokens = HashedWriter(folder / TOKENS, self.meta.num_tokens * dtype.itemsize)
        self._offsets = HashedWriter(folder / OFFSETS, (self.meta.num_documents + 1) * OFFSET_TYPE.itemsize)
        if tails and tails != self._tails():
            self.close()
            raise _damaged(folder, "what an unfinished build has written has changed")
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
        """Make the token file visible, complete, as ``folder``."""
        self._tokens.finish()
        self._offsets.finish()
        _write_content(self._folder, {"meta": dataclasses.asdict(self.meta), "dtype": self._dtype.str, "key": key})
        self.close()
        for name in (_JOURNAL, _OWNER):
            (self._folder / name).unlink()
        sync_path(self._folder)
        self._folder.rename(folder)
        sync_path(folder.parent)

    def discard(self) -> None:
        """Remove all that was written."""
        self.close()
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Leave what is committed for a later process."""
        for stream in (self._tokens, self._offsets, self._journal):
            stream.close()

    def _tails(self) -> list[int]:
        return [self._tokens.tail_digest(), self._offsets.tail_digest()]

    def _last_commit(self) -> tuple[int, TokenMeta, list[int]]:
        journal = self._folder / _JOURNAL
        journal.touch()
        raw = journal.read_bytes()
        complete = raw.rfind(b"\n") + 1  # a line without its newline was cut by a kill
        os.truncate(journal, complete)
        lines = raw[:complete].splitlines()
        if not lines:
            return 0, TokenMeta(), []
        try:
            row = json.loads(lines[-1])
            return int(row["num_pieces"]), TokenMeta(**row["meta"]), [int(tail) for tail in row["tails"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._folder, f"{_JOURNAL} cannot be read ({error!r})") from error

    def _commit(self) -> None:
        self._tokens.sync()
        self._offsets.sync()
        owner = self._folder / _OWNER
        if not owner.exists() or owner.read_text() != self._token:
            raise StagingTaken(
                f"another node builds the token cache in {self._folder.parent} too, and file locks do not reach it: "
                "set data.cache_folder to a folder on a disk of each node, or start again when the other has finished"
            )
        row = {"num_pieces": self.num_pieces, "meta": dataclasses.asdict(self.meta), "tails": self._tails()}
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


@contextmanager
def written_whole(path: Path, what: str) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all; CacheWriteError, with ``what`` it is, where it cannot be written.

    For one process of a node at a time; where locks do not reach across nodes, each writes a file of its own. What a kill
    leaves behind is written over by the next one.
    """
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}.building")
    try:
        with atomic_file(path, unfinished) as stream:
            yield stream
    except OSError as error:
        raise CacheWriteError(f"cannot write {what} {path}: {error}; {FREE_SPACE}") from error


class _Hashing:
    """Writes to a stream and hashes what it writes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.hasher = ExtentHasher()
        self.table = bytearray()

    def write(self, data: Any) -> None:
        """Append any contiguous buffer."""
        self._stream.write(data)
        self.table += self.hasher.update(data)


@contextmanager
def written_with_hashes(path: Path, what: str) -> Iterator[_Hashing]:
    """As `written_whole`, for a file with a hash table next to it."""
    with written_whole(path, what) as stream:
        writer = _Hashing(stream)
        yield writer
        with written_whole(table_path(path), f"the hash table of {what}") as table:
            table.write(writer.table + writer.hasher.finish())
