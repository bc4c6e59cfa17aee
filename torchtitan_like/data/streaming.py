"""Streamed sources: text that is too large to be cached as tokens is tokenised just ahead of where it is read.

The text is a row of *blocks*: a few MiB of lines, a row group, a file. In each epoch the blocks are permuted, and so many of
them on end as hold `WINDOW_BYTES` are a *window*: a token file like that of a small corpus, with its documents permuted, cut
into samples as any other, and the samples permuted. The last sample of a window may be padded, as that of an epoch is.

A window follows from its number alone, so that a cursor (a window, and how many samples lie before it) is all there is to
be saved: it is the same on every rank of every layout, and any of them reaches it at once.

Who first needs a window makes it, under a lock, in the folder of the token cache: once for all processes that share this
folder. They make the next windows meanwhile, in a thread, each another one. What lies behind the reader is deleted. A window
that is missing is made again: when it is made and deleted is a matter of time alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.config.sections_training import Data

from . import best_fit, packing
from .errors import DataError
from .formats.documents import CACHE_FOLDER_NAME, Corpus, Span, block, count_blocks
from .mixture import UNKNOWN_SIZE, seed_of
from .order import PERMUTATION_VERSION, shuffled
from .packing import NO_SAMPLE, JoinedSamples, PackedSamples, Samples
from .token_cache import Found, TokenPolicy, cache_key, check_ids, encode_piece, find_or_build
from .token_file import EncodedPiece, Staging, TokenFile, open_token_file, token_type

# Changes whenever any window of any text would hold other samples. Saved with the data position.
WINDOW_VERSION = 1
WINDOW_BYTES = 32 * 2**20
# A window has room for this many samples of 4 bytes a token at least, so that what pads its last one is little.
MIN_SAMPLES = 128
NUM_AHEAD = 4  # windows


class StreamedSamples(JoinedSamples):
    """The samples of ``corpus``, numbered on end through all windows of all epochs (``max_epochs`` 0: without end).

    seed: keys the order; None: as in the files. Reading makes what is missing. Beyond the end there is only padding.
    """

    num_samples = UNKNOWN_SIZE

    def __init__(
        self,
        corpus: Corpus,
        policy: TokenPolicy,
        seq_len: int,
        data: Data,
        *,
        dump_folder: str,
        seed: int | None,
        max_epochs: int,
    ) -> None:
        self.parts, self.seq_len, self.dtype = (), seq_len, token_type(policy.tokenizer.vocab_size)
        is_best_fit = data.packing == "best_fit"
        self.packing = best_fit.BestFitSamples.packing if is_best_fit else packing.PACKING
        self.mask_document_starts = data.mask_document_starts or is_best_fit
        self.corpus, self._policy, self._data, self._dump_folder = corpus, policy, data, dump_folder
        self._folder = Path(data.cache_folder or Path(dump_folder, CACHE_FOLDER_NAME)).expanduser().absolute()
        self._key = cache_key(corpus, policy)
        counts, sizes = self._cached("blocks", _open_counts, self._count_blocks, wait=True).T
        self._block_ends, self.num_blocks = np.cumsum(counts), int(counts.sum())
        if not self.num_blocks:
            raise DataError(f"no text in the {len(corpus.files)} files of {corpus.folder}")
        wanted = max(WINDOW_BYTES, 4 * MIN_SAMPLES * seq_len) * self.num_blocks
        self.window_blocks = min(max(1, round(wanted / int(sizes.sum()))), self.num_blocks)
        self.windows_per_epoch = -(-self.num_blocks // self.window_blocks)
        self._num_windows = max_epochs * self.windows_per_epoch or UNKNOWN_SIZE
        self._seeds = None if seed is None else [seed_of(what, seed) for what in ("blocks", "documents", "samples")]
        self._key |= {"order": self.order, "seeds": self._seeds}
        self._ahead: threading.Thread | None = None
        self._ahead_from = -1
        self.go_to(0, 0)

    @property
    def order(self) -> str:
        """What decides, beside seed and files, which documents a window holds."""
        return f"windows of {self.window_blocks} of {self.num_blocks} blocks, version {WINDOW_VERSION}.{PERMUTATION_VERSION}"

    @property
    def files(self) -> str:
        """Number, names and sizes of the files: their contents are not read to know them."""
        names = [(str(file.relative_to(self.corpus.folder)), file.stat().st_size) for file in self.corpus.files]
        return f"{len(names)} files, {xxhash.xxh3_64_hexdigest(json.dumps(names).encode())}"

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
            folder = self._folder / self._name(f"window-{self._first + self._deleted}")
            self._open.pop(self._first + self._deleted, None)
            self._deleted += 1
            with suppress(OSError):  # another process was faster
                shutil.rmtree(folder.rename(folder.with_name(f".{uuid.uuid4().hex}")))
                folder.with_name(f".{folder.name}.lock").unlink()

    def _by_part(self, samples: NDArray[np.int64]) -> list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]]:
        self.advance(int(samples.max(initial=NO_SAMPLE)) + 1)
        index = np.searchsorted(self._starts, samples, side="right") - 1
        found: list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]] = []
        for window in np.unique(index[(samples != NO_SAMPLE) & (samples < self._starts[-1])]).tolist():
            part = self._window(self._first + window)
            assert part is not None
            mine = np.flatnonzero(index == window)
            own = samples[mine] - self._starts[window]
            if self._seeds is not None:
                own = shuffled(own, part.num_samples, self._seeds[2], self._first + window)
            found.append((part, mine, own))
        self._look_ahead(self._first + len(self._starts) - 1)
        return found

    def _look_ahead(self, number: int) -> None:
        """Make the windows from ``number`` on in a thread. It ends with the process: see `_make`."""
        if number == self._ahead_from or (self._ahead and self._ahead.is_alive()):
            return
        self._ahead_from, self._ahead = number, threading.Thread(target=self._make_ahead, args=(number,))
        self._ahead.start()

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
            self._open[number] = (
                best_fit.pack(file, self.seq_len, beside, self._dump_folder) if num_labels > 0 else None
            )
        return self._open[number]

    def _file(self, number: int, *, wait: bool) -> TokenFile:
        key = {**self._key, "window": number}
        return self._cached(
            f"window-{number}",
            lambda folder: _open_window(folder, key),
            lambda folder: self._make(folder, key),
            wait,
        )

    def _make(self, folder: Path, key: dict[str, Any]) -> TokenFile:
        pieces = []
        for span in self._blocks(key["window"]):
            if not threading.main_thread().is_alive():
                sys.exit()  # out of the thread: the process, which waits for it, is to end
            pieces.append(encode_piece(self.corpus, (span,), self._policy))
        # Under a name of its own: where locks do not reach across nodes, each makes it, and the first stays.
        building = folder.with_name(f".{uuid.uuid4().hex}")
        try:
            staging = Staging(building, self.dtype)
            staging.append(self._mixed(pieces, key["window"]))
            check_ids(staging, self._policy)
            staging.publish(folder, key)
        except OSError as error:
            if open_token_file(folder, key) is None:
                raise DataError(f"the tokens {folder} of a streamed source were not written: {error}") from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        made = open_token_file(folder, key)
        assert made is not None
        return made

    def _blocks(self, number: int) -> list[Span]:
        """The text of a window, in the order of the files."""
        epoch, window = divmod(number, self.windows_per_epoch)
        places = np.arange(self.num_blocks)[window * self.window_blocks :][: self.window_blocks]
        if self._seeds is not None:
            places = np.sort(shuffled(places, self.num_blocks, self._seeds[0], epoch))
        files = np.searchsorted(self._block_ends, places, side="right").tolist()
        starts = [0, *self._block_ends.tolist()]
        return [
            block(self.corpus, file, place - starts[file]) for file, place in zip(files, places.tolist(), strict=True)
        ]

    def _mixed(self, pieces: Sequence[EncodedPiece], number: int) -> EncodedPiece:
        """The documents of a window, permuted."""
        tokens, lengths, hashes = (
            np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("tokens", "lengths", "hashes")
        )
        if self._seeds is not None and len(lengths):
            order = shuffled(np.arange(len(lengths)), len(lengths), self._seeds[1], number)
            documents = np.split(tokens, np.cumsum(lengths)[:-1].astype(np.int64))
            tokens = np.concatenate([documents[index] for index in order.tolist()])
            lengths, hashes = lengths[order], hashes[order]
        num_empty, text_bytes = (sum(getattr(piece, name) for piece in pieces) for name in ("num_empty", "text_bytes"))
        return EncodedPiece(tokens, lengths, hashes, num_empty, text_bytes)

    def _count_blocks(self, file: Path) -> NDArray[np.int64]:
        counts = np.array(count_blocks(self.corpus), np.int64)
        unfinished = file.with_name(f".{uuid.uuid4().hex}.npy")
        np.save(unfinished, counts)
        unfinished.replace(file)
        return counts

    def _cached(
        self, what: str, find: Callable[[Path], Found | None], build: Callable[[Path], Found], wait: bool
    ) -> Found:
        return find_or_build(
            self._name(what),
            find,
            build,
            beside=self.corpus.folder,
            cache_folder=str(self._folder),
            dump_folder=self._dump_folder,
            wait=wait,
        )

    def _name(self, what: str) -> str:
        return f"{what}-{xxhash.xxh3_64_hexdigest(json.dumps(self._key, sort_keys=True).encode())}"


def _open_counts(file: Path) -> NDArray[np.int64] | None:
    return np.load(file) if file.exists() else None


def _open_window(folder: Path, key: dict[str, Any]) -> TokenFile | None:
    try:
        return open_token_file(folder, key)
    except (DataError, OSError):
        if folder.exists():
            raise
        return None  # who reads further on deleted it just now
