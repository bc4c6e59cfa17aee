"""Text is tokenised once: the token file of a corpus is built when it is first needed and found again ever after.

Its folder lies in `.token_cache/` next to the data, in ``cache_folder`` where one is named, or in
the user's cache
folder where the data are read-only. Caches that earlier versions left in a visible `token_cache/`
are found too. The
folder's name ends with a hash of all it depends on: names, sizes and modification times of the
files, the field, the
tokenizer, BOS and EOS. Times and not contents, because start-up must not read a terabyte to find
that nothing has
changed; copies with other times are tokenised again, and `TokenMeta.text_digest` then shows that
they are the same text.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import CacheWriteError, DataError, WorkerKilled
from .formats.documents import (
    CACHE_FOLDER_NAME,
    PIECES_VERSION,
    VISIBLE_CACHE_FOLDER_NAME,
    Corpus,
    Piece,
    piece_size,
    plan_pieces,
    read_piece,
)
from .formats.records import BadRecord, Span
from .formats.tokenizer import Tokenizer, load_tokenizer
from .token_file import FREE_SPACE, EncodedPiece, Staging, StagingTaken, TokenFile, open_token_file, token_type

logger = logging.getLogger()

# Changes with anything that makes a token file, or a half-built one, of an older version unusable.
FORMAT_VERSION = 1
# Starting worker processes takes seconds: fewer pieces than this are tokenised without.
MIN_PIECES_FOR_WORKERS = 4
PROGRESS_SECONDS = 10.0
POLL_SECONDS = 1.0  # between looks at work that another process does
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
    stop: threading.Event | None = None,
) -> TokenFile:
    """The token file of ``corpus``, built now unless it is there. Safe to call from any number of processes at once.

    ``num_workers``: processes that tokenise; None: as many as there are cores. The result does not
    depend on it. ``stop``: set
    by another thread to end the build, with `BuildStopped`.

    Raises DataError for texts that cannot be read, a corpus without text, and where no cache folder can be written.
    """
    return cached_entry(
        entry_of(corpus, name, policy),
        corpus,
        policy,
        cache_folder=cache_folder,
        dump_folder=dump_folder,
        num_workers=num_workers,
        stop=stop,
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


def cached_entry(
    entry: Entry,
    corpus: Corpus,
    policy: TokenPolicy,
    *,
    cache_folder: str | None,
    dump_folder: str,
    num_workers: int | None = None,
    stop: threading.Event | None = None,
) -> TokenFile:
    """As `cached_tokens`, for a caller that has ``entry`` of ``corpus`` already: a million files
    take seconds to look at.
    """
    return find_or_build(
        entry.name,
        entry.open,
        lambda folder: _build(corpus, policy, folder, entry.key, num_workers or num_cores(), stop),
        beside=corpus.folder,
        cache_folder=cache_folder,
        dump_folder=dump_folder,
        stop=stop,
    )


def find_cached(
    name: str, find: Callable[[Path], Found | None], *, beside: Path, cache_folder: str | None, dump_folder: str
) -> Found | None:
    """What ``find`` finds in the first folder where an entry ``name`` of the cache lies; None:
    there is none."""
    writable, others = _folders(beside, cache_folder, dump_folder)
    for folder in writable + others:
        if (entry := find(folder / name)) is not None:
            return entry
    return None


def _folders(
    beside: Path, cache_folder: str | None, dump_folder: str
) -> tuple[list[Path], list[Path]]:
    """Folders in which an entry may be built, the first writable one is taken; and others, in
    which it may lie."""
    if cache_folder:
        return [Path(cache_folder).absolute()], []
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    users = [user_cache / "torchtitan_like" / "token_cache"]
    in_run = Path(dump_folder).absolute() / VISIBLE_CACHE_FOLDER_NAME
    # A user without a home folder has a relative path here.
    writable = [beside / CACHE_FOLDER_NAME, *(users if user_cache.is_absolute() else []), in_run]
    return writable, [beside / VISIBLE_CACHE_FOLDER_NAME]


def find_or_build(
    name: str,
    find: Callable[[Path], Found | None],
    build: Callable[[Path], Found],
    *,
    beside: Path,
    cache_folder: str | None,
    dump_folder: str,
    wait: bool = True,
    stop: threading.Event | None = None,
) -> Found:
    """What ``find`` finds at one of the places where an entry ``name`` of the cache may lie; else what ``build`` makes there.

    ``beside``: where the data lie. Only one process builds at a time: the others wait, or raise BlockingIOError. Raises
    DataError where no place can be written.
    """
    places: Any = {"beside": beside, "cache_folder": cache_folder, "dump_folder": dump_folder}
    found = find_cached(name, find, **places)
    if found is not None:
        return found
    candidate, problems = writable_folder(**places)
    if problems:
        logger.info(f"the token cache of {beside} goes to {candidate}: {'; '.join(problems)}")
    entry = candidate / name
    with _locked(candidate / f".{name}.lock", entry, wait, stop):
        found = find(entry)  # another process may have built it while this one waited
        return build(entry) if found is None else found


def writable_folder(
    *, beside: Path, cache_folder: str | None, dump_folder: str
) -> tuple[Path, list[str]]:
    """The folder in which entries of the cache are built, and why the folders before it are not
    taken.

    Raises DataError where none can be written.
    """
    problems: list[str] = []
    for folder in _folders(beside, cache_folder, dump_folder)[0]:
        problem = _why_not_writable(folder)
        if problem is None:
            return folder, problems
        problems.append(problem)
    raise CacheWriteError(
        f"the token cache of {beside} cannot be written: {'; '.join(problems)}; set data.cache_folder to a writable folder"
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
    for name, file in zip(corpus.relative_names(), corpus.files, strict=True):
        size, time_ns = corpus.size_and_time(file)
        state.update(f"{name}\0{size}\0{time_ns}\0".encode())
    return {"count": len(corpus.files), "hash": state.hexdigest()}


def _why_not_writable(folder: Path) -> str | None:
    """None if files can be made in ``folder``: tried, since permissions do not tell of read-only
    file systems."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


@contextmanager
def _locked(
    lock: Path, entry: Path, wait: bool, stop: threading.Event | None = None
) -> Iterator[None]:
    """Hold ``lock``; says so when it has to wait, or raises BlockingIOError. The system frees it when its holder ends,
    however it ends. Raises BuildStopped if ``stop`` is set meanwhile.
    """
    with _writing(entry):
        opened = lock.open("w")
    with opened as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            logger.info(f"waiting for another process to build {entry}")
            _wait_for_lock(stream, stop)
        except OSError as error:
            raise DataError(
                f"the file system of {lock.parent} has no file locks ({error}): set data.cache_folder to a folder on a "
                "local disk"
            ) from error
        try:
            yield
        finally:  # a process that was forked meanwhile still has the file open
            fcntl.flock(stream, fcntl.LOCK_UN)


def _wait_for_lock(stream: TextIO, stop: threading.Event | None) -> None:
    if stop is None:
        fcntl.flock(stream, fcntl.LOCK_EX)
        return
    while not stop.wait(POLL_SECONDS):
        with suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    raise BuildStopped


def _build(
    corpus: Corpus,
    policy: TokenPolicy,
    folder: Path,
    key: dict[str, Any],
    num_workers: int,
    stop: threading.Event | None,
) -> TokenFile:
    """Tokenise the corpus, going on after the last committed piece of a build that was killed."""
    unfinished = folder.with_name(f".{folder.name}.building-{PIECES_VERSION}")
    with _writing(folder):
        staging = Staging(unfinished, token_type(policy.tokenizer.vocab_size))
    try:
        _fill(staging, corpus, policy, folder, num_workers, stop)
        _check(staging, corpus, key)
        with _writing(folder):
            staging.publish(folder, key)
    except BrokenProcessPool as error:
        raise WorkerKilled(
            f"a process that tokenizes {corpus.folder} was killed, usually because memory ran low: the token cache "
            f"{folder} is not finished; start again to continue after {staging.num_pieces:,} pieces, or build "
            "it with fewer processes (scripts/tokenize_corpus.py --workers)"
        ) from error
    except OSError as error:
        raise DataError(f"the token cache {folder} was not finished: {error}; what was done is kept") from error
    except (StagingTaken, BuildStopped, CacheWriteError):
        raise
    except DataError:
        staging.discard()  # of no use: the files have to be changed
        raise
    finally:
        staging.close()
    built = open_token_file(folder, key)
    assert built is not None
    return built


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError inside into a CacheWriteError that names the token cache ``folder``."""
    try:
        yield
    except OSError as error:
        raise CacheWriteError(
            f"cannot write the token cache {folder}: {error}; what was done is kept: {FREE_SPACE} to continue"
        ) from error


class BuildStopped(Exception):
    """Another thread has ended the build; what was done is kept."""


def _fill(
    staging: Staging,
    corpus: Corpus,
    policy: TokenPolicy,
    folder: Path,
    num_workers: int,
    stop: threading.Event | None,
) -> None:
    """Append the pieces that are not yet there."""
    pieces = plan_pieces(corpus)
    rest = pieces[staging.num_pieces :]
    total = sum(map(piece_size, pieces))
    progress = Progress(total, total - sum(map(piece_size, rest)), staging.meta.num_tokens)
    again = f", going on after {staging.num_pieces} of {len(pieces)} pieces" if staging.num_pieces else ""
    logger.info(
        f"tokenising {corpus.folder}: {len(corpus.files)} files, {total / 2**20:,.1f} MiB, into {folder}{again}"
    )
    bytes_before = staging.meta.text_bytes

    def report(text_bytes: int, added: int = 0) -> None:
        """``text_bytes``: bytes of text that this process and its workers have encoded so far."""
        if stop is not None and stop.is_set():
            raise BuildStopped
        in_work = text_bytes - (staging.meta.text_bytes - bytes_before)
        line = progress.line(added, staging.meta.num_tokens, max(in_work, 0))
        if line:
            logger.info(f"tokenising {corpus.folder}: {line}")

    first_bad = ""
    for piece, encoded in zip(rest, _encode_all(corpus, rest, policy, num_workers, report), strict=True):
        with _writing(folder):
            staging.append(encoded)
        first_bad = first_bad or encoded.first_bad
        report(0, piece_size(piece))
    meta = staging.meta
    if meta.num_bad:
        logger.warning(
            f"{corpus.folder}: {meta.num_bad:,} bad records left out{first_bad and f', the first of them: {first_bad}'}"
        )
    empty = f" ({meta.num_empty:,} empty ones left out)" if meta.num_empty else ""
    rates = progress.rates(meta.num_tokens)
    logger.info(f"tokenised: {meta.num_documents:,} documents{empty}, {meta.num_tokens:,} tokens, {rates}")


def _check(staging: Staging, corpus: Corpus, key: dict[str, Any]) -> None:
    """Raise DataError where what was written must not be published."""
    if _file_identities(corpus) != key["files"]:
        raise DataError(
            f"files in {corpus.folder} changed while they were tokenised: start again when they are complete"
        )
    if staging.meta.num_documents == 0:
        raise DataError(f"no text in {corpus}")


def _encode_all(
    corpus: Corpus,
    pieces: list[Piece],
    policy: TokenPolicy,
    num_workers: int,
    report: Callable[[int], None],
) -> Iterator[EncodedPiece]:
    """The pieces in order, tokenised by ``num_workers`` processes; twice as many pieces are in
    memory at once.

    ``report`` is called now and then with the bytes of text that were encoded so far; what it
    raises ends the work.
    """
    num_workers = min(num_workers, len(pieces))
    if len(pieces) < MIN_PIECES_FOR_WORKERS or num_workers == 1:
        done = 0

        def count(text_bytes: int) -> None:
            nonlocal done
            done += text_bytes
            report(done)

        yield from (encode_piece(corpus, piece, policy, count) for piece in pieces)
        return
    # Spawned, not forked: the trainer may have threads and a CUDA context by now.
    context = get_context("spawn")
    counter = context.Value("q", 0)
    # The list of files may be long, and the pieces name theirs.
    without_files = replace(corpus, files=())
    arguments = without_files, policy.tokenizer.path, policy.bos_id, policy.eos_id, counter
    with ProcessPoolExecutor(num_workers, context, _start_worker, arguments) as pool:
        waiting: deque[Future[EncodedPiece]] = deque()

        def first_result() -> EncodedPiece:
            while True:
                try:
                    return waiting[0].result(POLL_SECONDS)
                except FutureTimeout:
                    report(counter.value)

        try:
            for piece in pieces:
                waiting.append(pool.submit(_encode_in_worker, piece))
                if len(waiting) == 2 * num_workers:
                    yield first_result()
                    waiting.popleft()
            while waiting:
                yield first_result()
                waiting.popleft()
        except BaseException:  # also GeneratorExit: the pool would wait for the started work
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            for future in waiting:
                future.cancel()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker: tuple[Corpus, TokenPolicy, Any]


def _start_worker(
    corpus: Corpus, tokenizer_path: str, bos_id: int | None, eos_id: int | None, counter: Any
) -> None:
    global _worker
    _worker = (corpus, TokenPolicy(load_tokenizer(tokenizer_path), bos_id, eos_id), counter)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(piece: Piece) -> EncodedPiece:
    corpus, policy, counter = _worker

    def count(text_bytes: int) -> None:
        with counter.get_lock():
            counter.value += text_bytes

    return encode_piece(corpus, piece, policy, count)


def encode_piece(
    corpus: Corpus,
    piece: Iterable[Span],
    policy: TokenPolicy,
    report: Callable[[int], None] = lambda text_bytes: None,
) -> EncodedPiece:
    """Read and tokenise one piece. A document without any token is left out, and counted.

    ``report`` is called with bytes of text as they are encoded. Raises DataError, with the file,
    for a document that is too
    long (`Tokenizer.parts`) and for ids beyond the vocabulary.
    """
    found = _Encoded(policy)
    spans = list(piece)
    for group in _groups(read_piece(corpus, spans)):
        found.bad += [record for record in group if isinstance(record, BadRecord)]
        texts = [record for record in group if isinstance(record, str)]
        try:
            if len(texts) == 1:
                found.add_long(texts[0], report)
            elif texts:
                found.add(texts, report)
        except DataError as error:
            files = sorted({span.file for span in spans})
            raise DataError(f"{', '.join(files[:3])}: {error}") from error
    return found.as_piece()


class _Encoded:
    """Documents that were encoded: their tokens, with BOS and EOS, in the type on disk."""

    def __init__(self, policy: TokenPolicy) -> None:
        self._tokenizer = policy.tokenizer
        self._before, self._after = (
            np.array([] if end is None else [end], np.uint32) for end in (policy.bos_id, policy.eos_id)
        )
        self._dtype = token_type(policy.tokenizer.vocab_size)
        self._tokens = array("H" if self._dtype.itemsize == 2 else "I")
        self._lengths: list[NDArray[np.int64]] = []
        self._hashes: list[int] = []
        self._num_empty = 0
        self._text_bytes = 0
        self.bad: list[BadRecord] = []

    def add(self, texts: Sequence[str], report: Callable[[int], None]) -> None:
        """Encode some documents in one call."""
        ids, lengths = self._tokenizer.encode_texts(texts)
        is_empty = lengths == 0
        raw = [text.encode() for text, empty in zip(texts, is_empty.tolist(), strict=True) if not empty]
        self._hashes += map(xxhash.xxh3_64_intdigest, raw)
        self._num_empty += int(is_empty.sum())
        lengths = lengths[~is_empty]
        num_before, num_added = len(self._before), len(self._before) + len(self._after)
        ends = np.cumsum(lengths + num_added)
        tokens = np.empty(len(ids) + len(lengths) * num_added, np.uint32)
        tokens[np.arange(len(ids)) + np.repeat(np.arange(len(lengths)) * num_added + num_before, lengths)] = ids
        if num_before:
            tokens[ends - lengths - num_added] = self._before
        if len(self._after):
            tokens[ends - 1] = self._after
        self._append(tokens)
        self._lengths.append(lengths + num_added)
        num_bytes = sum(map(len, raw))
        self._text_bytes += num_bytes
        report(num_bytes)

    def add_long(self, text: str, report: Callable[[int], None]) -> None:
        """Encode one document in parts: what a tokenizer makes of a text takes many times its
        memory."""
        digest, num_bytes, length = xxhash.xxh3_64(), 0, 0
        for part in self._tokenizer.parts(text):
            ids, _ = self._tokenizer.encode_texts([part])
            if not length and len(ids):
                self._append(self._before)
            self._append(ids)
            raw = part.encode()
            digest.update(raw)
            length += len(ids)
            num_bytes += len(raw)
            report(len(raw))
        if not length:
            self._num_empty += 1
            return
        self._append(self._after)
        self._lengths.append(np.array([length + len(self._before) + len(self._after)]))
        self._hashes.append(digest.intdigest())
        self._text_bytes += num_bytes

    def as_piece(self) -> EncodedPiece:
        """What was added."""
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths]).astype(np.uint64)
        return EncodedPiece(
            np.frombuffer(self._tokens, self._dtype),
            lengths,
            np.array(self._hashes, np.uint64),
            self._num_empty,
            self._text_bytes,
            len(self.bad),
            str(self.bad[0]) if self.bad else "",
        )

    def _append(self, ids: NDArray[np.uint32]) -> None:
        largest, vocab_size = int(ids.max(initial=0)), self._tokenizer.vocab_size
        if largest >= vocab_size:
            raise DataError(
                f"{self._tokenizer.path} gave the id {largest}, beyond its vocabulary of {vocab_size}"
            )
        self._tokens.frombytes(ids.astype(self._dtype).data.cast("B") if len(ids) else b"")


def _groups(records: Iterable[str | BadRecord]) -> Iterator[list[str | BadRecord]]:
    """Some records at a time; a long one by itself."""
    group, num_characters = list[str | BadRecord](), 0
    for record in records:
        size = len(record) if isinstance(record, str) else 0
        if group and num_characters + size > GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
        group.append(record)
        num_characters += size
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

    def line(self, added: int, tokens: int, in_work: int = 0) -> str | None:
        """Count ``added`` bytes; a line to print, at most one in ``PROGRESS_SECONDS``.

        in_work: bytes of which the work is done, but which are not counted yet.
        """
        self.done += added
        now = self.clock()
        if now - self._last_line < PROGRESS_SECONDS:
            return None
        self._last_line = now
        done = min(self.done + in_work, self.total)
        seconds, since = now - self._first[0], done - self._first[1]
        left = round((self.total - done) * seconds / max(1, since))
        eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        share, rates = 100 * done / max(1, self.total), self.rates(tokens, in_work)
        return f"{share:.0f}% of {self.total / 2**20:,.0f} MiB, {tokens:,} tokens, {rates}, ETA {eta}"

    def rates(self, tokens: int, in_work: int = 0) -> str:
        """Bytes and tokens per second since the start of this process's work."""
        start, done, first_tokens = self._first
        seconds = max(self.clock() - start, 1e-9)
        speed = (self.done + in_work - done) / seconds / 2**20
        return f"{speed:,.1f} MiB/s, {(tokens - first_tokens) / seconds:,.0f} tokens/s"
