"""Best-fit packing: no document that fits into one sample is split.

The method is described in Ding et al. 2024, "Fewer Truncations Improve Language Modeling", §3. A
sample has room for seq_len + 1 tokens: seq_len inputs, and the same tokens shifted by one as
labels. A longer document is split into pieces. Each piece starts with the last token of the piece
before it, so that no label is lost. Best-fit decreasing assigns the pieces from the longest to the
shortest. Each goes to the sample with the least sufficient room, or to a new sample.

- Every token of a document, except its first one, is a label exactly once in an epoch. The first
  one is never a label, for any ``mask_document_starts``: the token before it comes from packing,
  not from the text. Documents of one token are dropped.
- No document of at most seq_len + 1 tokens is split.
- Padding is only at the end of a sample, and is never a label.
- Positions restart at 0 in each document, and in each piece of a split document.
- The pieces of a sample are in text order. The samples are in the text order of their longest
  pieces. The plan depends only on the lengths of the documents.
- Documents that share a sample may be anywhere in the file. If the file does not fit into memory, a
  sample costs one disk access for each of its documents.

A plan is made once for each token file and ``seq_len``. It is stored next to the token file, as a
file of 64-bit words with a hash table: a header; the first piece of each sample, then the number of
pieces; the first token of each piece.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.config.sections_training import Data
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples.packing import Indices2d, PackedSamples
from torchtitan_like.data.text.file_lists import CACHE_FOLDER_NAMES
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    HashTable,
    RawFile,
    table_path,
)
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.data.tokens.token_file import PROGRESS_SECONDS, TokenFile, written_with_hashes

logger = logging.getLogger()

# Increase it with any change of the tokens in a sample.
VERSION = 1
_WORD = np.dtype("<u8")


def pack(file: TokenFile, seq_len: int, data: Data, folders: CacheFolders) -> PackedSamples:
    """Return the samples of ``file``, packed by the method `Data.packing`."""
    if data.packing == "best_fit":
        return BestFitSamples(file, seq_len, folders)
    return PackedSamples(file, seq_len, mask_document_starts=data.mask_document_starts)


class BestFitSamples(PackedSamples):
    """The samples of a token file, packed by best-fit decreasing. Makes a missing plan."""

    packing = f"best-fit decreasing, version {VERSION}"

    def __init__(self, file: TokenFile, seq_len: int, folders: CacheFolders) -> None:
        super().__init__(file, seq_len, mask_document_starts=True)
        if not self.num_labels:
            raise DataError(
                f"all {file.meta.num_documents:,} documents of {file.folder} have one token. "
                "Expected 2 or more for best-fit packing, an input and a label: set data.packing = "
                '"concat" to predict a document from the one before it'
            )
        self._plan = cached_plan(file, seq_len, folders)
        self.num_samples = self._plan.num_samples

    def _read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = np.zeros((len(samples), self.seq_len + 1), self.file.tokens.dtype)
        row, column, start, length = self._pieces(samples)
        for piece in zip(
            row.tolist(), column.tolist(), start.tolist(), length.tolist(), strict=True
        ):
            row_index, offset, first, size = piece
            self.file.tokens.fill(rows[row_index, offset : offset + size], first)
        return rows, _sums(row, length, len(samples))

    def _ignored_starts(self, samples: NDArray[np.int64]) -> Indices2d:
        """Return rows and columns of the labels of ``samples`` (rows,) that start a document."""
        row, column, _, _ = self._pieces(samples)
        is_label = column > 0
        return row[is_label], column[is_label] - 1

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        row, column, _, _ = self._pieces(samples)
        return self._positions_since(samples, row, column)

    def _pieces(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return row, column, first token and length of each piece of ``samples`` (rows,)."""
        is_sample = samples >= 0
        first = self._plan.first_pieces[np.where(is_sample, samples, 0)]
        end = self._plan.first_pieces[np.where(is_sample, samples + 1, 0)]
        counts = np.where(is_sample, end - first, 0)
        row = np.repeat(np.arange(len(samples)), counts)
        shifts = np.repeat(first - (np.cumsum(counts) - counts), counts)
        start = self._plan.starts[np.arange(counts.sum()) + shifts]
        offsets = self.file.offsets
        document_ends = offsets[offsets.searchsorted(start.astype(np.uint64), side="right")]
        length = np.minimum(document_ends.astype(np.int64) - start, self.seq_len + 1)
        row_sizes = _sums(row, length, len(samples))
        tokens_above = np.cumsum(row_sizes) - row_sizes  # in all earlier rows
        return row, np.cumsum(length) - length - tokens_above[row], start, length


@dataclass(frozen=True)
class Plan:
    """The pieces of every sample.

    first_pieces: int64 (num_samples + 1,), first piece of each sample, then the number of pieces.
    starts: int64 (num_pieces,), first token of each piece.
    """

    first_pieces: NDArray[np.int64] | CheckedArray
    starts: NDArray[np.int64] | CheckedArray

    @property
    def num_samples(self) -> int:
        return len(self.first_pieces) - 1


def cached_plan(file: TokenFile, seq_len: int, folders: CacheFolders) -> Plan:
    """Return the plan of ``file`` from the folders of token caches; make it if it is missing.

    Any number of processes may call it at once. Raises DataError if the plan is damaged, or if no
    folder is writable.
    """
    is_cache = file.folder.parent.name in CACHE_FOLDER_NAMES
    return folders.find_or_build(
        plan_name(file, seq_len),
        lambda path: open_plan(path, file, seq_len),
        lambda path: _build(path, file, seq_len),
        file.folder.parent.parent if is_cache else file.folder,
    )


def plan_name(file: TokenFile, seq_len: int) -> str:
    """Return the file name of a plan."""
    return f"{file.folder.name}-{file.meta.text_digest:016x}.best_fit-v{VERSION}-{seq_len}"


def open_plan(path: Path, file: TokenFile, seq_len: int) -> Plan | None:
    """Open the plan of ``file``; None if it is missing. Takes milliseconds for any size.

    Raises DataError if the plan is damaged or belongs to another file.
    """
    key = _key(file, seq_len)
    try:
        header = np.fromfile(path, _WORD, len(key) + 2)
    except FileNotFoundError:
        return None
    size = path.stat().st_size
    is_complete = len(header) == len(key) + 2
    num_samples, num_pieces = header[len(key) :].tolist() if is_complete else (0, 0)
    first_word, starts_word = len(key) + 2, len(key) + 3 + num_samples
    expected_size = (starts_word + num_pieces) * _WORD.itemsize
    if not np.array_equal(header[: len(key)], key) or size != expected_size:
        raise DataError(
            f"the packing plan {path} is damaged: it has {size:,} bytes. Expected the plan of "
            f"{file.folder} for samples of {seq_len} tokens: delete it, and it is made again"
        )
    if not table_path(path).exists():
        return None
    raw = RawFile(path)
    checked = CheckedFile(raw, HashTable(raw, f"delete {path}, and it is made again"))
    checked.verify(0)

    def words(start: int, count: int) -> CheckedArray:
        dtype = np.dtype(np.int64)
        return CheckedArray(checked, dtype, start * _WORD.itemsize, count, in_memory=True)

    return Plan(words(first_word, num_samples + 1), words(starts_word, num_pieces))


def make_plan(offsets: NDArray[np.uint64], seq_len: int) -> Plan:
    """Pack the documents between ``offsets`` (num_documents + 1,) by best-fit decreasing."""
    starts, lengths = _split(offsets.view(np.int64), seq_len)
    sort_keys = (seq_len + 1 - lengths).astype(np.min_scalar_type(seq_len))
    longest_first = np.argsort(sort_keys, kind="stable")
    counts = np.bincount(lengths, minlength=seq_len + 2)
    del lengths
    sample = _best_fit(counts, seq_len + 1)
    num_samples = int(sample.max()) + 1
    # The longest piece of a sample was assigned first. Reversed, its assignment is the last one.
    longest = np.empty(num_samples, np.int64)
    longest[sample[::-1]] = longest_first[::-1]
    new_number = np.empty(num_samples, np.int64)
    new_number[np.argsort(longest)] = np.arange(num_samples)
    sample_of_piece = np.empty_like(sample)
    sample_of_piece[longest_first] = new_number[sample]
    del sample, longest_first, longest, new_number
    first_pieces = np.zeros(num_samples + 1, np.int64)
    np.cumsum(np.bincount(sample_of_piece, minlength=num_samples), out=first_pieces[1:])
    return Plan(first_pieces, starts[np.argsort(sample_of_piece, kind="stable")])


def _split(offsets: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first token and length of each piece in text order. Each piece has a label."""
    num_pieces = -(-(np.diff(offsets) - 1) // seq_len)
    pieces_before = np.cumsum(num_pieces) - num_pieces
    starts = np.repeat(offsets[:-1] - pieces_before * seq_len, num_pieces)
    starts += np.arange(len(starts)) * seq_len
    return starts, np.minimum(np.repeat(offsets[1:], num_pieces) - starts, seq_len + 1)


def _best_fit(counts: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the sample of each piece (num_pieces,), from the longest piece to the shortest.

    counts[n]: number of pieces with n tokens.

    Among samples of equal room, the oldest one is used. Samples of equal room are handled as one
    group. Each gets as many pieces of the current length as fit, because its remaining room is then
    the tightest fit for the next piece.
    """
    sample_of = np.empty(counts.sum(), np.int64)
    # Heap of (room, samples) with enough room for the current length.
    fitting: list[tuple[int, NDArray[np.int64]]] = []
    too_small: dict[int, list[NDArray[np.int64]]] = defaultdict(list)  # room -> arrays of samples
    num_done = num_samples = 0
    last_line = time.monotonic()
    for length in range(capacity, 1, -1):
        if length in too_small:
            heappush(fitting, (length, np.sort(np.concatenate(too_small.pop(length)))))
        num_remaining = int(counts[length])
        while num_remaining:
            if fitting:
                room, samples = heappop(fitting)
            else:
                num_new = -(-num_remaining // (capacity // length))
                room, samples = capacity, num_samples + np.arange(num_new)
                num_samples += num_new
            per_sample = room // length
            num_placed = min(num_remaining, per_sample * len(samples))
            num_full, num_in_last = divmod(num_placed, per_sample)
            num_used = num_full + (num_in_last > 0)
            placed = np.repeat(samples[:num_used], per_sample)[:num_placed]
            sample_of[num_done : num_done + num_placed] = placed
            num_done += num_placed
            num_remaining -= num_placed
            for remaining_room, group in (
                (room - per_sample * length, samples[:num_full]),
                (room - num_in_last * length, samples[num_full:num_used]),
                (room, samples[num_used:]),
            ):
                if len(group) and remaining_room >= length:
                    heappush(fitting, (remaining_room, group))
                elif len(group) and remaining_room > 1:
                    too_small[remaining_room].append(group)
        if time.monotonic() - last_line > PROGRESS_SECONDS:
            last_line = time.monotonic()
            percent = 100 * num_done / len(sample_of)
            logger.info(f"packing: {percent:.0f}% of {len(sample_of):,} pieces")
    return sample_of


def _build(path: Path, file: TokenFile, seq_len: int) -> Plan:
    """Make the plan and write it."""
    start = time.monotonic()
    logger.info(
        f"packing the {file.meta.num_documents:,} documents of {file.folder} into samples of "
        f"{seq_len:,} tokens"
    )
    plan = make_plan(file.offsets[:], seq_len)
    with written_with_hashes(path, "the packing plan") as stream:
        header = [*_key(file, seq_len), plan.num_samples, len(plan.starts)]
        stream.write(np.array(header, _WORD).data)
        stream.write(plan.first_pieces[:].astype(_WORD).data)
        stream.write(plan.starts[:].astype(_WORD).data)
    num_labels = file.meta.num_tokens - file.meta.num_documents
    padding = 1 - (num_labels + len(plan.starts)) / (plan.num_samples * (seq_len + 1))
    logger.info(
        f"packed: {len(plan.starts):,} pieces in {plan.num_samples:,} samples, "
        f"{100 * padding:.2f}% padding, {time.monotonic() - start:.1f} s"
    )
    written = open_plan(path, file, seq_len)
    assert written is not None
    return written


def _key(file: TokenFile, seq_len: int) -> NDArray[np.uint64]:
    meta = file.meta
    key = [VERSION, seq_len, meta.num_tokens, meta.num_documents, meta.text_digest]
    return np.array(key, np.uint64)


def _sums(row: NDArray[np.int64], values: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    return np.bincount(row, values, num_rows).astype(np.int64)
