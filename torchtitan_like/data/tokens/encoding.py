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

import numpy as np
import xxhash

from torchtitan_like.data.data_errors import BuildStopped, DataError, TokenizerError
from torchtitan_like.data.text.documents import Corpus, Piece, Record, read_piece
from torchtitan_like.data.text.formats import Span
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.data.text.user_documents import Document
from torchtitan_like.data.tokens.token_file import (
    NOT_TRAINED,
    PROGRESS_SECONDS,
    EncodedPiece,
    token_type,
)
from torchtitan_like.util.units import format_duration

# Starting worker processes takes seconds: a corpus of fewer pieces is tokenized without them.
MIN_PIECES_FOR_WORKERS = 4
POLL_SECONDS = 1.0  # between two looks for a request to stop, while the workers are busy
GROUP_CHARACTERS = 1 << 18  # tokenized in one call
_MARK = int(NOT_TRAINED)


@dataclass(frozen=True)
class TokenPolicy:
    """The encoding of a document: by ``tokenizer``, between BOS and EOS unless these are None."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None


# ---- a corpus


def encode_all(
    corpus: Corpus,
    pieces: list[Piece],
    policy: TokenPolicy,
    num_workers: int,
    stop: threading.Event | None = None,
) -> Iterator[EncodedPiece]:
    """Yield the pieces in order, tokenized by ``num_workers`` processes.

    Up to ``2 * num_workers`` pieces are in memory at once. User code runs in this process only.
    Raises BuildStopped if ``stop`` is set.
    """
    num_workers = min(num_workers, len(pieces))
    if len(pieces) < MIN_PIECES_FOR_WORKERS or num_workers == 1 or corpus.runs_user_code:
        yield from (encode_piece(corpus, piece, policy, stop) for piece in pieces)
        return
    # Spawned, not forked: the trainer may already have threads and a CUDA context.
    context = get_context("spawn")
    # Workers do not need the list of files, which may be long: each piece names its own.
    without_files = replace(corpus, files=())
    arguments = without_files, policy.tokenizer.path, policy.bos_id, policy.eos_id
    with ProcessPoolExecutor(num_workers, context, _start_worker, arguments) as pool:
        waiting: deque[Future[EncodedPiece]] = deque()

        def first_result() -> EncodedPiece:
            while True:
                try:
                    return waiting[0].result(POLL_SECONDS)
                except FutureTimeout:
                    _check_stop(stop)

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


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise BuildStopped


_worker: tuple[Corpus, TokenPolicy]


def _start_worker(
    corpus: Corpus, tokenizer_path: str, bos_id: int | None, eos_id: int | None
) -> None:
    global _worker
    # There is a worker for each core: threads of the `tokenizers` library would only compete.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _worker = (corpus, TokenPolicy(load_tokenizer(tokenizer_path), bos_id, eos_id))
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent ends. Otherwise it would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(piece: Piece) -> EncodedPiece:
    corpus, policy = _worker
    return encode_piece(corpus, piece, policy)


# ---- one piece


def encode_piece(
    corpus: Corpus,
    piece: Iterable[Span],
    policy: TokenPolicy,
    stop: threading.Event | None = None,
) -> EncodedPiece:
    """Read and tokenize one piece. Documents without tokens are skipped and counted.

    A document that is too long (`Tokenizer.parts`), or that the tokenizer cannot encode, is a bad
    record. Raises TokenizerError for token ids beyond the vocabulary, and BuildStopped between two
    groups of documents if ``stop`` is set.
    """
    has_masks = corpus.processor is not None
    encoder = _PieceEncoder(policy, has_masks=has_masks)
    records = read_piece(corpus, piece)
    for group in _groups(records) if not has_masks else ([record] for record in records):
        _check_stop(stop)
        try:
            encoder.add([record.document for record in group if record.document is not None])
        except TokenizerError:
            raise
        except DataError:
            for index, record in enumerate(group):
                try:
                    encoder.add([] if record.document is None else [record.document])
                except DataError as error:
                    group[index] = record.without_document(str(error))
                    if corpus.on_bad_record == "error":
                        raise group[index].error() from error
        encoder.bad += [record for record in group if record.document is None]
    return encoder.as_piece()


class _PieceEncoder:
    """Collects encoded documents: their tokens, with BOS and EOS, in the type on disk.

    has_masks: tokens of parts that are not trained on are marked.
    """

    def __init__(self, policy: TokenPolicy, *, has_masks: bool) -> None:
        self._policy = policy
        self._tokenizer = policy.tokenizer
        self._has_masks = has_masks
        self._dtype = token_type(policy.tokenizer.vocab_size, has_masks=has_masks)
        self._tokens = array("H" if self._dtype.itemsize == 2 else "I")
        self._lengths: list[int] = []
        self._hashes: list[int] = []
        self._num_empty = 0
        self._text_bytes = 0
        self.bad: list[Record] = []

    def add(self, documents: Sequence[Document]) -> None:
        """Encode one document, or several texts. Adds none of them if it raises DataError."""
        if len(documents) == 1:
            self._add_in_parts(documents[0])
            return
        texts = [document for document in documents if isinstance(document, str)]
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            start = self._start_document()
            self._append(ids)
            raw = text.encode()
            self._end_document(start, xxhash.xxh3_64_intdigest(raw), len(raw))

    def _add_in_parts(self, document: Document) -> None:
        """Encode one document in parts, because a tokenizer needs many times the input's memory."""
        parts = [(document, True)] if isinstance(document, str) else document
        start = self._start_document()
        digest = xxhash.xxh3_64()
        num_bytes, is_trained = 0, True
        try:
            for text, is_trained in parts:
                for part in self._tokenizer.parts(text):
                    self._append(self._tokenizer.encode_batch([part])[0], is_trained=is_trained)
                    raw = part.encode()
                    digest.update(raw)
                    num_bytes += len(raw)
        except DataError:
            del self._tokens[start:]
            raise
        if self._has_masks:
            digest = xxhash.xxh3_64(json.dumps(parts).encode())
        self._end_document(start, digest.intdigest(), num_bytes, is_trained=is_trained)

    def _start_document(self) -> int:
        """Append BOS. Returns the number of tokens before."""
        start = len(self._tokens)
        if self._policy.bos_id is not None:
            self._tokens.append(self._policy.bos_id | (_MARK if self._has_masks else 0))
        return start

    def _end_document(
        self, start: int, digest: int, num_bytes: int, *, is_trained: bool = True
    ) -> None:
        """Append EOS to the tokens from ``start`` on, and count the document if it has tokens."""
        if len(self._tokens) - start == (self._policy.bos_id is not None):
            del self._tokens[start:]
            self._num_empty += 1
            return
        if self._policy.eos_id is not None:
            self._tokens.append(self._policy.eos_id | (0 if is_trained else _MARK))
        self._lengths.append(len(self._tokens) - start)
        self._hashes.append(digest)
        self._text_bytes += num_bytes

    def _append(self, token_ids: array[int], *, is_trained: bool = True) -> None:
        ids = np.frombuffer(token_ids, np.uint32)
        largest = int(ids.max(initial=0))
        if largest >= self._tokenizer.vocab_size:
            raise TokenizerError(
                f"{self._tokenizer.path} returned the id {largest}. Expected ids below its "
                f"vocabulary size, {self._tokenizer.vocab_size}: check the tokenizer"
            )
        marked = ids if is_trained else ids | NOT_TRAINED
        self._tokens.frombytes(marked.astype(self._dtype).tobytes())

    def as_piece(self) -> EncodedPiece:
        """Return everything added so far."""
        return EncodedPiece(
            np.frombuffer(self._tokens, self._dtype),
            np.array(self._lengths, np.uint64),
            np.array(self._hashes, np.uint64),
            self._num_empty,
            self._text_bytes,
            len(self.bad),
            str(self.bad[0]) if self.bad else "",
        )


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records in groups of up to `GROUP_CHARACTERS`. A longer one is a separate group."""
    group: list[Record] = []
    num_characters = 0
    for record in records:
        size = len(record.document or "")
        if group and num_characters + size > GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
        group.append(record)
        num_characters += size
    yield group


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

    def line(self, added: int, tokens: int) -> str | None:
        """Count ``added`` bytes. Returns a line to log, at most once in `PROGRESS_SECONDS`."""
        self.done += added
        now = self.clock()
        if now - self._last_line < PROGRESS_SECONDS:
            return None
        self._last_line = now
        seconds = now - self._first[0]
        remaining = (self.total - self.done) * seconds / max(1, self.done - self._first[1])
        percent = 100 * self.done / max(1, self.total)
        return (
            f"{percent:.0f}% of {self.total / 2**20:,.0f} MiB, {tokens:,} tokens, "
            f"{self.rates(tokens)}, {format_duration(remaining)} left"
        )

    def rates(self, tokens: int) -> str:
        """Return MiB and tokens per second since the start of this build."""
        start, first_done, first_tokens = self._first
        seconds = max(self.clock() - start, 1e-9)
        speed = (self.done - first_done) / seconds / 2**20
        return f"{speed:,.1f} MiB/s, {(tokens - first_tokens) / seconds:,.0f} tokens/s"
