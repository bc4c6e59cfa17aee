"""Streamed sources: text that is too large to be cached as tokens is tokenized just ahead of where it is read.

The text is a row of *blocks*: a few MiB of lines, a row group, a file. In each epoch the blocks are permuted, and so many of
them on end as hold `WINDOW_BYTES` are a *window*: a token file like that of a small corpus, with its documents permuted, cut
into samples as any other, and the samples permuted. The last sample of a window may be padded, as that of an epoch is.

Of text on the Hub the files are permuted, and the blocks of each follow one another: a file is downloaded when the first
window with text of it is made.

A window follows from its number alone, so that a cursor (a window, and how many samples lie before it) is all there is to
be saved: it is the same on every rank of every layout, and any of them reaches it at once.

Who first needs a window makes it, under a lock, in the folder of the token cache: once for all processes that share this
folder. They make the next windows meanwhile, in a thread, each another one. What lies behind the reader is deleted. A window
that is missing is made again: when it is made and deleted is a matter of time alone.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.config.sections_training import Data
from torchtitan_like.data.errors import CacheWriteError, DataError
from torchtitan_like.data.samples import best_fit, packing
from torchtitan_like.data.samples.mixture import UNKNOWN_SIZE, seed_of
from torchtitan_like.data.samples.order import PERMUTATION_VERSION, shuffled
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples, Samples
from torchtitan_like.data.text.documents import VISIBLE_CACHE_FOLDER_NAME, Blocks, Corpus
from torchtitan_like.data.text.formats import Span
from torchtitan_like.data.tokens.encoding import TokenPolicy, encode_piece
from torchtitan_like.data.tokens.token_cache import cache_key, find_or_build
from torchtitan_like.data.tokens.token_file import (
    FREE_SPACE,
    EncodedPiece,
    Staging,
    TokenFile,
    open_token_file,
    token_type,
)

logger = logging.getLogger()

# Changes whenever any window of any text would hold other samples. Saved with the data position.
WINDOW_VERSION = 1
WINDOW_BYTES = 32 * 2**20
# A window has room for this many samples of 4 bytes a token at least, so that what pads its last one is little.
MIN_SAMPLES = 128
NUM_AHEAD = 4  # windows


def window_folder(data: Data, dump_folder: str) -> Path:
    """Return the folder of windows and of the files downloaded for them."""
    return Path(data.cache_folder or Path(dump_folder, VISIBLE_CACHE_FOLDER_NAME)).absolute()


class StreamedSamples(JoinedSamples):
    """The samples of ``corpus``, numbered on end through all windows of all epochs (``max_epochs`` 0: without end).

    seed: keys the order; None: as in the files. Reading makes what is missing. Beyond the end there is only padding.
    makes_windows_ahead: False: make only windows that are read, for readers of a single step.
    """

    num_samples = UNKNOWN_SIZE

    def __init__(
        self,
        corpus: Corpus,
        policy: TokenPolicy,
        seq_len: int,
        data: Data,
        dump_folder: str,
        seed: int | None,
        max_epochs: int,
        *,
        makes_windows_ahead: bool = True,
    ) -> None:
        self.num_labels = UNKNOWN_SIZE * seq_len
        self.parts, self.seq_len, self.dtype = (), seq_len, token_type(policy.tokenizer.vocab_size)
        is_best_fit = data.packing == "best_fit"
        self.packing = best_fit.BestFitSamples.packing if is_best_fit else packing.PACKING
        self.mask_document_starts = data.mask_document_starts or is_best_fit
        self.corpus, self._policy, self._data = corpus, policy, data
        self._folder = window_folder(data, dump_folder)
        self._places: Any = {"data_folder": corpus.folder, "cache_folder": str(self._folder), "dump_folder": dump_folder}
        self._blocks = Blocks(corpus)
        wanted = max(WINDOW_BYTES, 4 * MIN_SAMPLES * seq_len) * len(self._blocks) / max(1, self._blocks.num_bytes)
        self._at_once = min(max(1, round(wanted)), len(self._blocks))
        self.windows_per_epoch = -(-len(self._blocks) // self._at_once)
        self._num_windows = max_epochs * self.windows_per_epoch or UNKNOWN_SIZE
        self._seeds = None if seed is None else [seed_of(what, seed) for what in ("blocks", "documents", "samples")]
        order = (
            f"windows of {self._at_once} of {len(self._blocks)} blocks{' by file' * (corpus.listing is not None)}, "
            f"version {WINDOW_VERSION}.{PERMUTATION_VERSION}"
        )
        self.identity = {"files": self._blocks.identity, "order": order}
        self._key = cache_key(corpus, policy) | {"order": order, "seeds": self._seeds}
        self._digest = xxhash.xxh3_64_hexdigest(json.dumps(self._key, sort_keys=True).encode())
        self._makes_windows_ahead = makes_windows_ahead
        self._ahead: threading.Thread | None = None
        self._ahead_from = -1
        self.go_to(0, 0)

    def __str__(self) -> str:
        return f"({self.corpus.folder}): streamed, {', '.join(self.identity.values())}"

    def go_to(self, window: int, start: int) -> None:
        """Begin with ``window``, before which lie ``start`` samples; nothing before it is asked for any more."""
        self._first, self._starts, self._deleted = window, [start], 0
        self._open: dict[int, PackedSamples | None] = {}

    def cursor(self, count: int) -> tuple[int, int]:
        """Where to `go_to` in order to read on behind ``count`` samples."""
        index = max(bisect_right(self._starts, count) - 1, 0)
        return self._first + index, self._starts[index]

    def advance(self, count: int) -> int:
        """Make sure of the windows of the first ``count`` samples; returns how many of these there are before the end."""
        while self._starts[-1] < count and (number := self._first + len(self._starts) - 1) < self._num_windows:
            part = self._window(number)
            self._starts.append(self._starts[-1] + (part.num_samples if part else 0))
            if len(self._starts) > self.windows_per_epoch and self._starts[-1] == self._starts[0]:
                raise DataError(f"nothing to be learnt in the {len(self.corpus.files)} files of {self.corpus.folder}")
        return min(count, self._starts[-1])

    def delete_before(self, count: int) -> None:
        """Delete the windows that lie wholly in the first ``count`` samples. No process may need them any more."""
        while self._deleted < len(self._starts) - 1 and self._starts[self._deleted + 1] <= count:
            folder = self._folder / f"window-{self._first + self._deleted}-{self._digest}"
            self._open.pop(self._first + self._deleted, None)
            self._deleted += 1
            with suppress(OSError):  # another process was faster
                shutil.rmtree(folder.rename(folder.with_name(f".{uuid.uuid4().hex}")))
                folder.with_name(f".{folder.name}.lock").unlink()

    def _by_part(self, samples: NDArray[np.int64]) -> list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]]:
        self.advance(int(samples.max(initial=NO_SAMPLE)) + 1)
        index = np.searchsorted(self._starts, samples, side="right") - 1
        found: list[Any] = []
        for window in np.unique(index[(samples != NO_SAMPLE) & (samples < self._starts[-1])]).tolist():
            part = self._window(self._first + window)
            assert part is not None
            mine = np.flatnonzero(index == window)
            own = samples[mine] - self._starts[window]
            if self._seeds is not None:
                own = shuffled(own, part.num_samples, self._seeds[2], self._first + window)
            found.append((part, mine, own))
        number = self._first + len(self._starts) - 1
        is_busy = self._ahead is not None and self._ahead.is_alive()
        if self._makes_windows_ahead and number != self._ahead_from and not is_busy:
            self._ahead_from, self._ahead = number, threading.Thread(target=self._make_ahead, args=(number,))
            self._ahead.start()
        return found

    def _make_ahead(self, number: int) -> None:
        for ahead in range(number, min(number + NUM_AHEAD, self._num_windows)):
            with suppress(DataError, OSError):  # another process makes it; or whoever reads there will be told
                self._file(ahead, wait=False)

    def _window(self, number: int) -> PackedSamples | None:
        """The samples of a window; None where there is nothing to be learnt in it."""
        if number not in self._open:
            while len(self._open) > NUM_AHEAD:
                self._open.pop(next(iter(self._open)))
            file = self._file(number, wait=True)
            num_labels = file.meta.num_tokens - (file.meta.num_documents if self.mask_document_starts else 1)
            # A plan of best-fit packing lies in the window's own folder, and goes with it.
            beside = self._data.model_copy(update={"cache_folder": str(file.folder)})
            part = best_fit.pack(file, self.seq_len, beside, str(self._folder)) if num_labels > 0 else None
            self._open[number] = part
        return self._open[number]

    def _file(self, number: int, *, wait: bool) -> TokenFile:
        key = self._key | {"window": number}
        name = f"window-{number}-{self._digest}"
        return find_or_build(name, lambda at: _find(at, key), lambda at: self._make(at, key), **self._places, wait=wait)

    def _make(self, folder: Path, key: dict[str, Any]) -> TokenFile:
        # Under a name of its own: where locks do not reach across nodes, each makes it, and the first stays.
        building = folder.with_name(f".{uuid.uuid4().hex}")
        piece = encode_piece(self.corpus, self._spans(key["window"]), self._policy)
        try:
            with closing(Staging(building, self.dtype)) as staging:
                staging.append(self._permuted(piece, key["window"]))
                staging.publish(folder, key)
            if piece.num_bad:
                logger.warning(
                    f"{self.corpus.folder}: {piece.num_bad:,} bad records left out, such as {piece.first_bad}"
                )
        except OSError as error:
            if _find(folder, key) is None:
                raise CacheWriteError(
                    f"cannot write the tokens of a streamed source, {folder}: {error}; {FREE_SPACE}"
                ) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return _find(folder, key) or self._make(folder, key)

    def _spans(self, number: int) -> Iterator[Span]:
        """The text of a window, in the order of the files."""
        epoch, window = divmod(number, self.windows_per_epoch)
        places = np.arange(window * self._at_once, min((window + 1) * self._at_once, len(self._blocks)))
        if self._seeds is not None:
            places = np.sort(self._shuffled_blocks(places, self._seeds[0], epoch))
        for place in places.tolist():
            if not threading.main_thread().is_alive():
                sys.exit()  # out of this thread: the process is to end, and waits for it
            yield self._blocks[place]

    def _shuffled_blocks(self, places: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        if self.corpus.listing is None:
            return shuffled(places, len(self._blocks), seed, epoch)
        ends = np.array(self._blocks.ends)
        files = shuffled(np.arange(len(ends)), len(ends), seed, epoch)
        behind = np.cumsum(np.diff(ends, prepend=0)[files])  # of the blocks in their new order
        file = np.searchsorted(behind, places, side="right")
        blocks: NDArray[np.int64] = ends[files[file]] - behind[file] + places
        return blocks

    def _permuted(self, piece: EncodedPiece, number: int) -> EncodedPiece:
        if self._seeds is None or not len(piece.lengths):
            return piece
        order = shuffled(np.arange(len(piece.lengths)), len(piece.lengths), self._seeds[1], number)
        documents = np.split(piece.tokens, np.cumsum(piece.lengths)[:-1].astype(np.int64))
        tokens = np.concatenate([documents[index] for index in order.tolist()])
        return replace(piece, tokens=tokens, lengths=piece.lengths[order], hashes=piece.hashes[order])


def _find(folder: Path, key: dict[str, Any]) -> TokenFile | None:
    try:
        return open_token_file(folder, key)
    except (DataError, OSError):
        if folder.exists():
            raise
        return None  # who reads further on has just deleted it
