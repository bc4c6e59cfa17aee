"""Turn text into tokens: one piece in this process, or a corpus on all CPU cores."""

from __future__ import annotations

import json
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.documents import Corpus, Piece, bad_document, read_piece
from torchtitan_like.data.text.formats import BadRecord, Document, Span
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.tokens.token_file import (
    NOT_TRAINED,
    PROGRESS_SECONDS,
    EncodedPiece,
    token_type,
)

# Starting worker processes takes seconds: a corpus of fewer pieces is tokenized without them.
MIN_PIECES_FOR_WORKERS = 4
POLL_SECONDS = 1.0  # between reports while the workers are busy
GROUP_CHARACTERS = 1 << 18  # tokenized in one call


@dataclass(frozen=True)
class TokenPolicy:
    """The encoding of a document: by ``tokenizer``, between BOS and EOS unless these are None."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None


# ---- a corpus


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(
    corpus: Corpus,
    pieces: list[Piece],
    policy: TokenPolicy,
    num_workers: int,
    report: Callable[[int], None],
) -> Iterator[EncodedPiece]:
    """Yield the pieces in order, tokenized by ``num_workers`` processes.

    Up to ``2 * num_workers`` pieces are in memory at once. User code runs in this process only.
    report: called regularly with the bytes of text encoded so far; an error that it raises ends the
    work.
    """
    num_workers = min(num_workers, len(pieces))
    if len(pieces) < MIN_PIECES_FOR_WORKERS or num_workers == 1 or corpus.runs_user_code:
        done = 0

        def count(text_bytes: int) -> None:
            nonlocal done
            done += text_bytes
            report(done)

        yield from (encode_piece(corpus, piece, policy, count) for piece in pieces)
        return
    # Spawned, not forked: the trainer may already have threads and a CUDA context.
    context = get_context("spawn")
    counter = context.Value("q", 0)
    # Workers do not need the list of files, which may be long: each piece names its own.
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
        except BaseException:  # also GeneratorExit: the pool would wait for the running work
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            for future in waiting:
                future.cancel()


_worker: tuple[Corpus, TokenPolicy, Any]


def _start_worker(
    corpus: Corpus, tokenizer_path: str, bos_id: int | None, eos_id: int | None, counter: Any
) -> None:
    global _worker
    # There is a worker for each core: threads of the `tokenizers` library would only compete.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _worker = (corpus, TokenPolicy(load_tokenizer(tokenizer_path), bos_id, eos_id), counter)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent ends. Otherwise it would wait for work forever."""
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


# ---- one piece


def encode_piece(
    corpus: Corpus,
    piece: Iterable[Span],
    policy: TokenPolicy,
    report: Callable[[int], None] = lambda text_bytes: None,
) -> EncodedPiece:
    """Read and tokenize one piece. Documents without tokens are skipped and counted.

    A document that is too long (`Tokenizer.parts`), or that the tokenizer cannot encode, is a bad
    record. report: called with the number of bytes of text of each group of documents. Raises
    TokenizerError for token ids beyond the vocabulary.
    """
    encoder = _PieceEncoder(policy, has_masks=corpus.processor is not None)
    spans, num_read = list(piece), 0
    for group in _groups(read_piece(corpus, spans)):
        encoder.bad += [record for record in group if isinstance(record, BadRecord)]
        documents = [record for record in group if not isinstance(record, BadRecord)]
        try:
            encoder.add_group(documents, report)
        except TokenizerError:
            raise
        except DataError:
            for number, record in enumerate(group, start=num_read):
                if isinstance(record, BadRecord):
                    continue
                try:
                    encoder.add_group([record], report)
                except DataError as error:
                    bad = bad_document(corpus, spans, number, str(error))
                    if corpus.on_bad_record == "error":
                        raise bad.error() from error
                    encoder.bad.append(bad)
        num_read += len(group)
    return encoder.as_piece()


class _PieceEncoder:
    """Collects encoded documents: their tokens, with BOS and EOS, in the type on disk."""

    def __init__(self, policy: TokenPolicy, *, has_masks: bool = False) -> None:
        self._tokenizer = policy.tokenizer
        self._has_masks = has_masks
        self._before = _as_array(policy.bos_id)
        self._after = _as_array(policy.eos_id)
        self._dtype = token_type(policy.tokenizer.vocab_size, has_masks=has_masks)
        self._tokens = array("H" if self._dtype.itemsize == 2 else "I")
        self._lengths: list[NDArray[np.int64]] = []
        self._hashes: list[int] = []
        self._num_empty = 0
        self._text_bytes = 0
        self.bad: list[BadRecord] = []

    def add_group(self, documents: Sequence[Document], report: Callable[[int], None]) -> None:
        """Encode documents. Adds none of them if it raises DataError."""
        start, num_tokens = len(self._lengths), len(self._tokens)
        counts = len(self._hashes), self._num_empty, self._text_bytes
        texts = [document for document in documents if isinstance(document, str)]
        try:
            if self._has_masks:
                for document in documents:
                    self._add_parts(document, report)
            elif len(texts) == 1:
                self._add_long(texts[0], report)
            elif texts:
                self._add(texts, report)
        except DataError:
            del self._lengths[start:], self._tokens[num_tokens:], self._hashes[counts[0] :]
            _, self._num_empty, self._text_bytes = counts
            raise

    def _add(self, texts: Sequence[str], report: Callable[[int], None]) -> None:
        """Encode several documents in one call of the tokenizer."""
        ids, lengths = self._tokenizer.encode_texts(texts)
        is_empty = lengths == 0
        pairs = zip(texts, is_empty.tolist(), strict=True)
        raw = [text.encode() for text, empty in pairs if not empty]
        self._hashes += map(xxhash.xxh3_64_intdigest, raw)
        self._num_empty += int(is_empty.sum())
        lengths = lengths[~is_empty]
        num_before = len(self._before)
        num_added = num_before + len(self._after)
        ends = np.cumsum(lengths + num_added)
        tokens = np.empty(len(ids) + len(lengths) * num_added, np.uint32)
        shifts = np.repeat(np.arange(len(lengths)) * num_added + num_before, lengths)
        tokens[np.arange(len(ids)) + shifts] = ids
        if num_before:
            tokens[ends - lengths - num_added] = self._before
        if len(self._after):
            tokens[ends - 1] = self._after
        self._append(tokens)
        self._lengths.append(lengths + num_added)
        num_bytes = sum(map(len, raw))
        self._text_bytes += num_bytes
        report(num_bytes)

    def _add_long(self, text: str, report: Callable[[int], None]) -> None:
        """Encode one document in parts, because a tokenizer needs many times the input's memory."""
        digest = xxhash.xxh3_64()
        num_bytes = length = 0
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

    def _add_parts(self, document: Document, report: Callable[[int], None]) -> None:
        """Encode the parts of one document. Tokens of parts that are not trained on are marked."""
        parts = [(document, True)] if isinstance(document, str) else document
        encoded = [
            (self._tokenizer.encode_texts([piece])[0], is_trained)
            for text, is_trained in parts
            for piece in self._tokenizer.parts(text)
        ]
        length = sum(len(ids) for ids, _ in encoded)
        if not length:
            self._num_empty += 1
            return
        for ids, is_trained in [(self._before, False), *encoded, (self._after, parts[-1][1])]:
            self._append(ids if is_trained else ids | NOT_TRAINED)
        raw = json.dumps(parts).encode()
        self._lengths.append(np.array([length + len(self._before) + len(self._after)]))
        self._hashes.append(xxhash.xxh3_64_intdigest(raw))
        self._text_bytes += sum(len(text.encode()) for text, _ in parts)
        report(len(raw))

    def as_piece(self) -> EncodedPiece:
        """Return everything added so far."""
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
        """Append ids, which may have the mark `NOT_TRAINED`."""
        largest = int((ids & ~NOT_TRAINED).max(initial=0))
        vocab_size = self._tokenizer.vocab_size
        if largest >= vocab_size:
            raise TokenizerError(
                f"{self._tokenizer.path} returned the id {largest}. Expected ids below its "
                f"vocabulary size, {vocab_size}: check the tokenizer"
            )
        self._tokens.frombytes(ids.astype(self._dtype).data.cast("B") if len(ids) else b"")


def _as_array(token_id: int | None) -> NDArray[np.uint32]:
    return np.array([] if token_id is None else [token_id], np.uint32)


def _groups(records: Iterable[Document | BadRecord]) -> Iterator[list[Document | BadRecord]]:
    """Yield records in groups of up to `GROUP_CHARACTERS`. A longer record is a separate group."""
    group = list[Document | BadRecord]()
    num_characters = 0
    for record in records:
        size = _num_characters(record)
        if group and num_characters + size > GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
        group.append(record)
        num_characters += size
    yield group


def _num_characters(record: Document | BadRecord) -> int:
    if isinstance(record, BadRecord):
        return 0
    return len(record) if isinstance(record, str) else sum(len(text) for text, _ in record)


# ---- progress


@dataclass
class Progress:
    """Rates and remaining time of a build that started at ``done`` of ``total`` bytes and at
    ``tokens`` tokens."""

    total: int
    done: int
    tokens: int
    clock: Callable[[], float] = time.monotonic
    _first: tuple[float, int, int] = field(init=False)
    _last_line: float = field(init=False)

    def __post_init__(self) -> None:
        self._last_line = self.clock()
        self._first = (self._last_line, self.done, self.tokens)

    def line(self, added: int, tokens: int, uncommitted: int = 0) -> str | None:
        """Count ``added`` bytes. Returns a line to log, at most once in `PROGRESS_SECONDS`.

        uncommitted: bytes that are encoded but not yet counted in ``done``.
        """
        self.done += added
        now = self.clock()
        if now - self._last_line < PROGRESS_SECONDS:
            return None
        self._last_line = now
        done = min(self.done + uncommitted, self.total)
        seconds = now - self._first[0]
        remaining = round((self.total - done) * seconds / max(1, done - self._first[1]))
        eta = f"{remaining // 3600}:{remaining // 60 % 60:02d}:{remaining % 60:02d}"
        percent = 100 * done / max(1, self.total)
        return (
            f"{percent:.0f}% of {self.total / 2**20:,.0f} MiB, {tokens:,} tokens, "
            f"{self.rates(tokens, uncommitted)}, ETA {eta}"
        )

    def rates(self, tokens: int, uncommitted: int = 0) -> str:
        """Return MiB and tokens per second since the start of this build."""
        start, first_done, first_tokens = self._first
        seconds = max(self.clock() - start, 1e-9)
        speed = (self.done + uncommitted - first_done) / seconds / 2**20
        return f"{speed:,.1f} MiB/s, {(tokens - first_tokens) / seconds:,.0f} tokens/s"
