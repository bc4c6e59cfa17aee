"""Text is tokenised once: the token file of a corpus is built when it is first needed and found again ever after.

Its folder lies beside the data (in `token_cache/`), in ``cache_folder`` where one is named, or in the dump folder
where the data are read-only. The folder's name ends with a hash of all it depends on: names, sizes and modification
times of the files, the field, the tokenizer, BOS and EOS. Times and not contents, because start-up must not read a
terabyte to find that nothing has changed; copies with other times are tokenised again, and `TokenMeta.text_digest`
then shows that they are the same text.

One process builds, under a file lock; the others wait for it. No torch.distributed is needed, and a lock dies with
its holder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from .errors import DataError
from .formats.documents import CACHE_FOLDER_NAME, PIECES_VERSION, Corpus, Piece, piece_size, plan_pieces, read_piece
from .formats.records import BadRecord, Span
from .formats.tokenizer import Tokenizer, load_tokenizer
from .token_file import EncodedPiece, Staging, StagingTaken, TokenFile, open_token_file, token_type

logger = logging.getLogger()

# Changes with anything that makes a token file, or a half-built one, of an older version unusable.
FORMAT_VERSION = 1
# Starting worker processes takes seconds: fewer pieces than this are tokenised without.
MIN_PIECES_FOR_WORKERS = 4
PROGRESS_SECONDS = 10.0
GROUP_CHARACTERS = 1 << 18  # that are tokenised in one call

Found = TypeVar("Found")


@dataclass(frozen=True)
class TokenPolicy:
    """What becomes of a document: its tokens, between BOS and EOS where these are ids."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None


def cached_tokens(
    corpus: Corpus,
    policy: TokenPolicy,
    *,
    name: str,
    cache_folder: str | None,
    dump_folder: str,
    num_workers: int | None = None,
) -> TokenFile:
    """The token file of ``corpus``, built now unless it is there. Safe to call from any number of processes at once.

    ``num_workers``: processes that tokenise; None: as many as there are cores. The result does not depend on it.

    Raises DataError for texts that cannot be read, a corpus without text, and where no cache folder can be written.
    """
    entry = entry_of(corpus, name, policy)
    return find_or_build(
        entry.name,
        entry.open,
        lambda folder: _build(corpus, policy, folder, entry.key, num_workers or num_cores()),
        beside=corpus.folder,
        cache_folder=cache_folder,
        dump_folder=dump_folder,
    )


@dataclass(frozen=True)
class Entry:
    """What the token file of a corpus is called, where its text lies, and what it was built for."""

    name: str
    beside: Path
    key: dict[str, Any]

    def open(self, folder: Path) -> TokenFile | None:
        return open_token_file(folder, self.key)


def entry_of(corpus: Corpus, name: str, policy: TokenPolicy) -> Entry:
    key = cache_key(corpus, policy)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    return Entry(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{digest}", corpus.folder, key)


def find_cached(
    name: str, find: Callable[[Path], Found | None], *, beside: Path, cache_folder: str | None, dump_folder: str
) -> Found | None:
    """What ``find`` finds at the first place where an entry ``name`` of the cache lies; None: there is none."""
    return next((x for at in _places(beside, cache_folder, dump_folder) if (x := find(at / name)) is not None), None)


def _places(beside: Path, cache_folder: str | None, dump_folder: str) -> list[Path]:
    places = [beside / CACHE_FOLDER_NAME, Path(dump_folder).absolute() / CACHE_FOLDER_NAME]
    return [Path(cache_folder).absolute()] if cache_folder else places


def find_or_build(
    name: str,
    find: Callable[[Path], Found | None],
    build: Callable[[Path], Found],
    *,
    beside: Path,
    cache_folder: str | None,
    dump_folder: str,
    wait: bool = True,
) -> Found:
    """What ``find`` finds at one of the places where an entry ``name`` of the cache may lie; else what ``build`` makes there.

    ``beside``: where the data lie. Only one process builds at a time: the others wait, or raise BlockingIOError. Raises
    DataError where no place can be written.
    """
    candidates = _places(beside, cache_folder, dump_folder)
    found = find_cached(name, find, beside=beside, cache_folder=cache_folder, dump_folder=dump_folder)
    if found is not None:
        return found
    for candidate in candidates:
        if not _writable(candidate):
            continue
        entry = candidate / name
        with _locked(candidate / f".{name}.lock", entry, wait):
            found = find(entry)  # another process may have built it while this one waited
            return build(entry) if found is None else found
    tried = " or ".join(str(candidate) for candidate in candidates)
    raise DataError(
        f"the token cache of {beside} cannot be written to {tried}: set data.cache_folder to a writable folder"
    )


def cache_key(corpus: Corpus, policy: TokenPolicy) -> dict[str, Any]:
    """All that the token file of ``corpus`` depends on, as it stands in its meta.json."""
    key = {
        "format_version": FORMAT_VERSION,
        "files": _file_identities(corpus),
        "text_format": corpus.format,
        "text_field": None if corpus.format == "text" else corpus.text_field,
        "tokenizer": policy.tokenizer.fingerprint,
        "bos": policy.bos_id,
        "eos": policy.eos_id,
    }
    # Only where it is not the default: caches of before there was a choice are still found.
    return key | ({"on_bad_record": corpus.on_bad_record} if corpus.on_bad_record != "error" else {})


def _file_identities(corpus: Corpus) -> dict[str, Any]:
    """Number of files and a hash of names, sizes and times; names are relative: a folder moves with its cache."""
    state = xxhash.xxh3_128()
    for file in corpus.files:
        size, time_ns = corpus.size_and_time(file)
        state.update(f"{file.relative_to(corpus.folder)}\0{size}\0{time_ns}\0".encode())
    return {"count": len(corpus.files), "hash": state.hexdigest()}


def _writable(folder: Path) -> bool:
    """Whether files can be made in ``folder``: tried, since permissions do not tell of read-only file systems."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        logger.info(f"nothing is cached in {folder}: {error}")
        return False


@contextmanager
def _locked(lock: Path, entry: Path, wait: bool) -> Iterator[None]:
    """Hold ``lock``; says so when it has to wait, or raises BlockingIOError. The system frees it when its holder ends,
    however it ends.
    """
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            logger.info(f"waiting for another process to build {entry}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"the file system of {lock.parent} has no file locks ({error}): set data.cache_folder to a folder on a "
                "local disk"
            ) from error
        try:
            yield
        finally:  # a process that was forked meanwhile still has the file open
            fcntl.flock(stream, fcntl.LOCK_UN)


def _build(corpus: Corpus, policy: TokenPolicy, folder: Path, key: dict[str, Any], num_workers: int) -> TokenFile:
    """Tokenise the corpus, going on after the last committed piece of a build that was killed."""
    unfinished = folder.with_name(f".{folder.name}.building-{PIECES_VERSION}")
    staging = Staging(unfinished, token_type(policy.tokenizer.vocab_size))
    try:
        _fill(staging, corpus, policy, folder, num_workers)
        _check(staging, corpus, policy, key)
        staging.publish(folder, key)
    except (BrokenProcessPool, OSError) as error:
        reason = "a worker was killed, most often for want of memory" if isinstance(error, BrokenProcessPool) else error
        raise DataError(f"the token cache {folder} was not finished: {reason}; what was done is kept") from error
    except StagingTaken:
        raise
    except DataError:
        staging.discard()  # of no use: the files have to be changed
        raise
    finally:
        staging.close()
    built = open_token_file(folder, key)
    assert built is not None
    return built


def _fill(staging: Staging, corpus: Corpus, policy: TokenPolicy, folder: Path, num_workers: int) -> None:
    """Append the pieces that are not yet there."""
    pieces = plan_pieces(corpus)
    rest = pieces[staging.num_pieces :]
    total = sum(map(piece_size, pieces))
    progress = Progress(total, total - sum(map(piece_size, rest)), staging.meta.num_tokens)
    again = f", going on after {staging.num_pieces} of {len(pieces)} pieces" if staging.num_pieces else ""
    logger.info(
        f"tokenising {corpus.folder}: {len(corpus.files)} files, {total / 2**20:,.1f} MiB, into {folder}{again}"
    )
    first_bad = ""
    for piece, encoded in zip(rest, _encode_all(corpus, rest, policy, num_workers), strict=True):
        staging.append(encoded)
        first_bad = first_bad or encoded.first_bad
        line = progress.line(piece_size(piece), staging.meta.num_tokens)
        if line:
            logger.info(f"tokenising {corpus.folder}: {line}")
    meta = staging.meta
    if meta.num_bad:
        logger.warning(
            f"{corpus.folder}: {meta.num_bad:,} bad records left out{first_bad and f', the first of them: {first_bad}'}"
        )
    empty = f" ({meta.num_empty:,} empty ones left out)" if meta.num_empty else ""
    rates = progress.rates(meta.num_tokens)
    logger.info(f"tokenised: {meta.num_documents:,} documents{empty}, {meta.num_tokens:,} tokens, {rates}")


def _check(staging: Staging, corpus: Corpus, policy: TokenPolicy, key: dict[str, Any]) -> None:
    """Raise DataError where what was written must not be published."""
    if cache_key(corpus, policy) != key:
        raise DataError(
            f"files in {corpus.folder} changed while they were tokenised: start again when they are complete"
        )
    if staging.meta.num_documents == 0:
        raise DataError(f"no text in {corpus}")
    check_ids(staging, policy)


def check_ids(staging: Staging, policy: TokenPolicy) -> None:
    """Raise DataError where a tokenizer gave ids that no model of its size can embed."""
    found, vocab_size = staging.meta.max_id, policy.tokenizer.vocab_size
    if found >= vocab_size:
        raise DataError(f"{policy.tokenizer.path} gave the id {found}, beyond its vocabulary of {vocab_size}")


def _encode_all(corpus: Corpus, pieces: list[Piece], policy: TokenPolicy, num_workers: int) -> Iterator[EncodedPiece]:
    """The pieces in order, tokenised by ``num_workers`` processes; twice as many pieces are in memory at once."""
    num_workers = min(num_workers, len(pieces))
    if len(pieces) < MIN_PIECES_FOR_WORKERS or num_workers == 1:
        yield from (encode_piece(corpus, piece, policy) for piece in pieces)
        return
    # Spawned, not forked: the trainer may have threads and a CUDA context by now.
    with ProcessPoolExecutor(
        num_workers, get_context("spawn"), _start_worker, (corpus, policy.tokenizer.path, policy.bos_id, policy.eos_id)
    ) as pool:
        waiting: deque[Future[EncodedPiece]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_encode_in_worker, piece))
                if len(waiting) == 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker: tuple[Corpus, TokenPolicy]


def _start_worker(corpus: Corpus, tokenizer_path: str, bos_id: int | None, eos_id: int | None) -> None:
    global _worker
    _worker = (corpus, TokenPolicy(load_tokenizer(tokenizer_path), bos_id, eos_id))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(piece: Piece) -> EncodedPiece:
    corpus, policy = _worker
    return encode_piece(corpus, piece, policy)


def encode_piece(corpus: Corpus, piece: Iterable[Span], policy: TokenPolicy) -> EncodedPiece:
    """Read and tokenise one piece. A document without any token is left out, and counted."""
    before, after = (array("I", [] if end is None else [end]) for end in (policy.bos_id, policy.eos_id))
    tokens = array("I")
    lengths, hashes, num_empty, text_bytes, bad = [], [], 0, 0, []
    for text, ids in _encode_documents(read_piece(corpus, piece), policy.tokenizer):
        if isinstance(text, BadRecord):
            bad.append(text)
            continue
        if not ids:
            num_empty += 1
            continue
        raw = text.encode()
        for part in (before, ids, after):
            tokens += part
        lengths.append(len(before) + len(ids) + len(after))
        hashes.append(xxhash.xxh3_64_intdigest(raw))
        text_bytes += len(raw)
    return EncodedPiece(
        np.array(tokens, token_type(policy.tokenizer.vocab_size)),
        np.array(lengths, np.uint64),
        np.array(hashes, np.uint64),
        num_empty,
        text_bytes,
        len(bad),
        str(bad[0]) if bad else "",
    )


def _encode_documents(
    records: Iterable[str | BadRecord], tokenizer: Tokenizer
) -> Iterator[tuple[str | BadRecord, array[int]]]:
    """Each record with its token ids; a bad one has none."""
    for group in _groups(records):
        encoded = iter(tokenizer.encode_batch([record for record in group if isinstance(record, str)]))
        yield from ((record, next(encoded) if isinstance(record, str) else array("I")) for record in group)


def _groups(records: Iterable[str | BadRecord]) -> Iterator[list[str | BadRecord]]:
    """Some records at a time: what a tokenizer makes of a text takes many times its memory."""
    group, num_characters = list[str | BadRecord](), 0
    for record in records:
        group.append(record)
        num_characters += len(record) if isinstance(record, str) else 0
        if num_characters >= GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
    yield group


@dataclass
class Progress:
    """Rates and remaining time of a build that began at ``done`` of ``total`` bytes and at ``tokens`` tokens."""

    total: int
    done: int
    tokens: int
    clock: Callable[[], float] = time.monotonic
    _first: tuple[float, int, int] = field(init=False)
    _last_line: float = field(init=False)

    def __post_init__(self) -> None:
        self._last_line = self.clock()
        self._first = (self._last_line, self.done, self.tokens)

    def line(self, added: int, tokens: int) -> str | None:
        """Count ``added`` bytes; a line to print, at most one in ``PROGRESS_SECONDS``."""
        self.done += added
        now = self.clock()
        if now - self._last_line < PROGRESS_SECONDS:
            return None
        self._last_line = now
        seconds, since = now - self._first[0], self.done - self._first[1]
        left = round((self.total - self.done) * seconds / max(1, since))
        eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        share = 100 * self.done / max(1, self.total)
        return f"{share:.0f}% of {self.total / 2**20:,.0f} MiB, {tokens:,} tokens, {self.rates(tokens)}, ETA {eta}"

    def rates(self, tokens: int) -> str:
        """Bytes and tokens per second since the start of this process's work."""
        start, done, first_tokens = self._first
        seconds = max(self.clock() - start, 1e-9)
        return f"{(self.done - done) / seconds / 2**20:,.1f} MiB/s, {(tokens - first_tokens) / seconds:,.0f} tokens/s"
