"""Streamed sources: tokenize a source that is too large for the token cache while it is read.

The source is a sequence of *blocks*: a few MiB of lines, a row group, or a file. The blocks are
permuted in each epoch. Consecutive blocks with about `WINDOW_BYTES` of text form a *window*. A
window is a token file, as for a small corpus: its documents are permuted, packed into
samples, and the samples are permuted. The last sample of a window may be padded.

Documents of an iterable of user code are read in order: its blocks are not permuted.

For text on the Hub, files are permuted instead of blocks. A file is downloaded when the first
window with its text is made.

The content of a window depends only on its number. The state of a stream is therefore a cursor: a
window, and the number of samples before it. It is equal on every rank of every layout.

The first process that needs a window makes it, under a lock, in the folder of the token cache. All
processes that share this folder read it. Threads of these processes make the next windows ahead,
each a different one. Windows before the reader are deleted. A missing window is made again.
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
from torchtitan_like.data.data_errors import CacheWriteError, DataError
from torchtitan_like.data.samples import best_fit, packing
from torchtitan_like.data.samples.order import PERMUTATION_VERSION, UNKNOWN_SIZE, seed_of, shuffled
from torchtitan_like.data.samples.packing import NO_SAMPLE, JoinedSamples, PackedSamples, Samples
from torchtitan_like.data.text.documents import Blocks, Corpus
from torchtitan_like.data.text.file_lists import VISIBLE_CACHE_FOLDER_NAME
from torchtitan_like.data.text.formats import Span
from torchtitan_like.data.tokens.encoding import TokenPolicy, encode_piece
from torchtitan_like.data.tokens.token_cache import CacheFolders, cache_key
from torchtitan_like.data.tokens.token_file import (
    FREE_SPACE,
    EncodedPiece,
    Staging,
    TokenFile,
    open_token_file,
    token_type,
)

logger = logging.getLogger()

# Increase it with any change of the samples in a window. It is saved with the data position.
WINDOW_VERSION = 1
WINDOW_BYTES = 32 * 2**20
# A window has room for at least this many samples of 4 bytes per token, so that the padding of its
# last sample is a small part.
MIN_SAMPLES = 128
NUM_AHEAD = 4  # number of windows made ahead


def window_folder(folders: CacheFolders) -> Path:
    """Return the folder of windows and of the files downloaded for them."""
    in_run = Path(folders.dump_folder, VISIBLE_CACHE_FOLDER_NAME)
    return Path(folders.cache_folder or in_run).absolute()


class StreamedSamples(JoinedSamples):
    """The samples of ``corpus``, with consecutive numbers through all windows of all epochs.

    max_epochs: 0 is no limit. Samples after the end are only padding.
    seed: seed of the order; None: file order.
    makes_windows_ahead: False: make only windows that are read, for readers of a single step.
    """

    num_samples = UNKNOWN_SIZE

    def __init__(
        self,
        corpus: Corpus,
        policy: TokenPolicy,
        seq_len: int,
        data: Data,
        folders: CacheFolders,
        seed: int | None,
        max_epochs: int,
        *,
        makes_windows_ahead: bool = True,
    ) -> None:
        self.num_labels = UNKNOWN_SIZE * seq_len
        self.parts = ()
        self.seq_len = seq_len
        self.dtype = token_type(policy.tokenizer.vocab_size, has_masks=corpus.processor is not None)
        is_best_fit = data.packing == "best_fit"
        self.packing = best_fit.BestFitSamples.packing if is_best_fit else packing.PACKING
        self.mask_document_starts = data.mask_document_starts or is_best_fit
        self.corpus = corpus
        self._policy = policy
        self._data = data
        self._folder = window_folder(folders)
        self._blocks = Blocks(corpus)
        window_bytes = max(WINDOW_BYTES, 4 * MIN_SAMPLES * seq_len)
        num_blocks = round(window_bytes * len(self._blocks) / max(1, self._blocks.num_bytes))
        self._blocks_per_window = min(max(1, num_blocks), len(self._blocks))
        self.windows_per_epoch = -(-len(self._blocks) // self._blocks_per_window)
        self._num_windows = max_epochs * self.windows_per_epoch or UNKNOWN_SIZE
        self._seeds: list[int] | None = None
        if seed is not None:
            self._seeds = [seed_of(unit, seed) for unit in ("blocks", "documents", "samples")]
        by_file = " by file" if corpus.listing is not None else ""
        self._is_sequential = corpus.documents is not None and corpus.documents.is_sequential
        if self._is_sequential:
            by_file = " in order"
        order = (
            f"windows of {self._blocks_per_window} of {len(self._blocks)} blocks{by_file}, "
            f"version {WINDOW_VERSION}.{PERMUTATION_VERSION}"
        )
        self.identity = {"files": self._blocks.identity, "order": order}
        if corpus.processor is not None:
            self.identity["processor"] = corpus.processor.identity
        self._key = cache_key(corpus, policy) | {"order": order, "seeds": self._seeds}
        self._digest = xxhash.xxh3_64_hexdigest(json.dumps(self._key, sort_keys=True).encode())
        self._makes_windows_ahead = makes_windows_ahead
        self._thread: threading.Thread | None = None
        self._thread_window = -1  # the first window that the thread makes
        self._first = 0  # the window to continue with
        self._starts = [0]  # number of samples before each opened window
        self._num_deleted = 0
        self._open: dict[int, PackedSamples | None] = {}

    def __str__(self) -> str:
        return f"({self.corpus.folder}): streamed, {', '.join(self.identity.values())}"

    def go_to(self, window: int, start: int) -> None:
        """Continue with ``window``, after ``start`` samples. Earlier samples become invalid."""
        self._first = window
        self._starts = [start]
        self._num_deleted = 0
        self._open = {}

    def cursor(self, count: int) -> tuple[int, int]:
        """Return the arguments of `go_to` that continue after ``count`` samples."""
        index = max(bisect_right(self._starts, count) - 1, 0)
        return self._first + index, self._starts[index]

    def advance(self, count: int) -> int:
        """Open the windows of the first ``count`` samples and return how many of them exist."""
        while self._starts[-1] < count:
            number = self._first + len(self._starts) - 1
            if number >= self._num_windows:
                break
            part = self._window(number)
            self._starts.append(self._starts[-1] + (part.num_samples if part else 0))
            if len(self._starts) > self.windows_per_epoch and self._starts[-1] == self._starts[0]:
                raise DataError(
                    f"the {len(self.corpus.files)} files of {self.corpus.folder} contain no "
                    "labels. Expected documents of 2 or more tokens: check the text"
                )
        return min(count, self._starts[-1])

    def delete_before(self, count: int) -> None:
        """Delete the windows of the first ``count`` samples. No process may still need them."""
        while (
            self._num_deleted < len(self._starts) - 1
            and self._starts[self._num_deleted + 1] <= count
        ):
            number = self._first + self._num_deleted
            folder = self._folder / f"window-{number}-{self._digest}"
            self._open.pop(number, None)
            self._num_deleted += 1
            with suppress(OSError):  # another process was faster
                shutil.rmtree(folder.rename(folder.with_name(f".{uuid.uuid4().hex}")))
                folder.with_name(f".{folder.name}.lock").unlink()

    def _by_part(
        self, samples: NDArray[np.int64]
    ) -> list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]]:
        self.advance(int(samples.max(initial=NO_SAMPLE)) + 1)
        index = np.searchsorted(self._starts, samples, side="right") - 1
        is_sample = (samples != NO_SAMPLE) & (samples < self._starts[-1])
        groups: list[Any] = []
        for window in np.unique(index[is_sample]).tolist():
            part = self._window(self._first + window)
            assert part is not None
            rows = np.flatnonzero(index == window)
            part_samples = samples[rows] - self._starts[window]
            if self._seeds is not None:
                part_samples = shuffled(
                    part_samples, part.num_samples, self._seeds[2], self._first + window
                )
            groups.append((part, rows, part_samples))
        self._start_making_ahead()
        return groups

    def _start_making_ahead(self) -> None:
        number = self._first + len(self._starts) - 1
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._makes_windows_ahead and number != self._thread_window and not is_busy:
            self._thread_window = number
            self._thread = threading.Thread(target=self._make_ahead, args=(number,))
            self._thread.start()

    def _make_ahead(self, first: int) -> None:
        for number in range(first, min(first + NUM_AHEAD, self._num_windows)):
            # Another process makes it, or the reader of this window raises the error.
            with suppress(DataError, OSError):
                self._file(number, wait=False)

    def _window(self, number: int) -> PackedSamples | None:
        """Return the samples of a window; None if it has no labels."""
        if number not in self._open:
            while len(self._open) > NUM_AHEAD:
                self._open.pop(next(iter(self._open)))
            file = self._file(number, wait=True)
            num_ignored = file.meta.num_documents if self.mask_document_starts else 1
            part = None
            if file.meta.num_tokens > num_ignored:
                # The packing plan is in the window's own folder, and is deleted with it.
                folders = CacheFolders(str(file.folder), str(self._folder))
                part = best_fit.pack(file, self.seq_len, self._data, folders)
            self._open[number] = part
        return self._open[number]

    def _file(self, number: int, *, wait: bool) -> TokenFile:
        key = self._key | {"window": number}
        name = f"window-{number}-{self._digest}"
        return CacheFolders(str(self._folder), "").find_or_build(
            name,
            lambda folder: _find(folder, key),
            lambda folder: self._make(folder, key),
            self.corpus.folder,
            wait=wait,
        )

    def _make(self, folder: Path, key: dict[str, Any]) -> TokenFile:
        # Without file locks between nodes, each node makes the window under a unique name. The
        # first one is published.
        building = folder.with_name(f".{uuid.uuid4().hex}")
        piece = encode_piece(self.corpus, self._spans(key["window"]), self._policy)
        try:
            with closing(Staging(building, self.dtype)) as staging:
                staging.append(self._permuted(piece, key["window"]))
                staging.publish(folder, key)
            if piece.num_bad:
                logger.warning(
                    f"{self.corpus.folder}: skipped {piece.num_bad:,} bad records, such as "
                    f"{piece.first_bad}"
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
        """Yield the blocks of a window in file order."""
        epoch, window = divmod(number, self.windows_per_epoch)
        first = window * self._blocks_per_window
        blocks = np.arange(first, min(first + self._blocks_per_window, len(self._blocks)))
        if self._seeds is not None:
            blocks = np.sort(self._shuffled_blocks(blocks, self._seeds[0], epoch))
        for block in blocks.tolist():
            if not threading.main_thread().is_alive():
                sys.exit()  # end this thread: the process is ending and waits for it
            yield self._blocks[block]

    def _shuffled_blocks(
        self, positions: NDArray[np.int64], seed: int, epoch: int
    ) -> NDArray[np.int64]:
        if self._is_sequential:
            return positions
        if self.corpus.listing is None:
            return shuffled(positions, len(self._blocks), seed, epoch)
        ends = np.array(self._blocks.ends)
        files = shuffled(np.arange(len(ends)), len(ends), seed, epoch)
        shuffled_ends = np.cumsum(np.diff(ends, prepend=0)[files])
        file = np.searchsorted(shuffled_ends, positions, side="right")
        blocks: NDArray[np.int64] = ends[files[file]] - shuffled_ends[file] + positions
        return blocks

    def _permuted(self, piece: EncodedPiece, number: int) -> EncodedPiece:
        if self._seeds is None or not len(piece.lengths):
            return piece
        num_documents = len(piece.lengths)
        order = shuffled(np.arange(num_documents), num_documents, self._seeds[1], number)
        documents = np.split(piece.tokens, np.cumsum(piece.lengths)[:-1].astype(np.int64))
        tokens = np.concatenate([documents[index] for index in order.tolist()])
        return replace(
            piece, tokens=tokens, lengths=piece.lengths[order], hashes=piece.hashes[order]
        )


def _find(folder: Path, key: dict[str, Any]) -> TokenFile | None:
    try:
        return open_token_file(folder, key)
    except (DataError, OSError):
        if folder.exists():
            raise
        return None  # a process that reads later samples deleted it
