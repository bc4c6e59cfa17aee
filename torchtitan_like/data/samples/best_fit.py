"""Samples in which no document is cut that fits into one ("best-fit packing").

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", §3. A sample has room for seq_len + 1 tokens: seq_len
inputs, and as labels the same shifted by one. A longer document is cut into full samples and a rest, each of which begins
with the last token of the piece before, so that no label is lost. Best-fit decreasing: the pieces, from the longest to the
shortest, each go to the sample with the least room that is enough for them, or else to a new one.

- Every token of a document but its first is a label exactly once in an epoch. What stands before a document's first token
  is there by packing and not by the text's order: that token is never a label, whatever ``mask_document_starts`` says. A
  document of one token has no label, and is left out.
- No document of at most seq_len + 1 tokens is cut.
- Padding stands at the end of a sample only, and is never a label.
- Positions begin anew at each document, and at each piece of one that was cut.
- The pieces of a sample stand in the order of the text, and the samples in that of their longest piece. The plan follows
  from the lengths of the documents alone. Documents that share a sample may lie anywhere in the file: where it does not
  fit into memory, a sample costs one access to the disk for each of its documents.

The plan is made once for a token file and a ``seq_len``, and lies beside the token file as one
file of 64-bit words, with a
hash table: a header, for each sample the number of its first piece (and at the end the number of
pieces), for each
piece the token where it begins.
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
from torchtitan_like.data.errors import DataError
from torchtitan_like.data.samples.packing import PackedSamples
from torchtitan_like.data.text.documents import CACHE_FOLDER_NAMES
from torchtitan_like.data.tokens.checked_file import (
    CheckedArray,
    CheckedFile,
    HashTable,
    RawFile,
    table_path,
)
from torchtitan_like.data.tokens.encoding import PROGRESS_SECONDS
from torchtitan_like.data.tokens.token_cache import find_or_build
from torchtitan_like.data.tokens.token_file import TokenFile, written_with_hashes

logger = logging.getLogger()

# Changes whenever any sample of any text would hold other tokens.
VERSION = 1
_WORD = np.dtype("<u8")


def pack(file: TokenFile, seq_len: int, data: Data, dump_folder: str) -> PackedSamples:
    """The samples of ``file`` as ``data.packing`` wants them."""
    if data.packing == "best_fit":
        return BestFitSamples(file, seq_len, cache_folder=data.cache_folder, dump_folder=dump_folder)
    return PackedSamples(file, seq_len, mask_document_starts=data.mask_document_starts)


class BestFitSamples(PackedSamples):
    """The samples of a token file, packed by best-fit decreasing; the plan is made now unless it is there."""

    packing = f"best-fit decreasing, version {VERSION}"

    def __init__(self, file: TokenFile, seq_len: int, *, cache_folder: str | None, dump_folder: str) -> None:
        super().__init__(file, seq_len, mask_document_starts=True)
        if not self.num_labels:
            raise DataError(
                f"all {file.meta.num_documents:,} documents of {file.folder} have one token: best-fit packing expects one "
                'with 2 or more, an input and a label; set data.packing = "concat" to learn a document from the one before'
            )
        self._plan = cached_plan(file, seq_len, cache_folder=cache_folder, dump_folder=dump_folder)
        self.num_samples = self._plan.num_samples

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = np.zeros((len(samples), self.seq_len + 1), self.file.tokens.dtype)
        row, column, start, length = self._pieces(samples)
        for piece in zip(row.tolist(), column.tolist(), start.tolist(), length.tolist(), strict=True):
            in_row, at, first, size = piece
            self.file.tokens.fill(rows[in_row, at : at + size], first)
        return rows, _sums(row, length, len(samples))

    def ignored_labels(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The labels of ``samples`` (rows,) that begin a document: their rows and columns."""
        row, column, _, _ = self._pieces(samples)
        behind_another = column > 0
        return row[behind_another], column[behind_another] - 1

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        row, column, _, _ = self._pieces(samples)
        return self._places(samples, row, column)

    def _pieces(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Row, column, first token and length of each piece of ``samples`` (rows,), in order."""
        real = samples >= 0
        first = self._plan.first_pieces[np.where(real, samples, 0)]
        counts = np.where(real, self._plan.first_pieces[np.where(real, samples + 1, 0)] - first, 0)
        row = np.repeat(np.arange(len(samples)), counts)
        start = self._plan.starts[np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)]
        offsets = self.file.offsets
        document_ends = offsets[offsets.searchsorted(start.astype(np.uint64), side="right")]
        length = np.minimum(document_ends.astype(np.int64) - start, self.seq_len + 1)
        before = _sums(row, length, len(samples))
        before = np.cumsum(before) - before  # tokens in all rows above
        return row, np.cumsum(length) - length - before[row], start, length


@dataclass(frozen=True)
class Plan:
    """first_pieces: int64 (num_samples + 1,), where the pieces of each sample begin; starts: int64 (num_pieces,), tokens."""

    first_pieces: NDArray[np.int64] | CheckedArray
    starts: NDArray[np.int64] | CheckedArray

    @property
    def num_samples(self) -> int:
        return len(self.first_pieces) - 1


def cached_plan(file: TokenFile, seq_len: int, *, cache_folder: str | None, dump_folder: str) -> Plan:
    """The plan of ``file``, from where token caches lie; made now unless it is there.

    Safe to call from any number of processes at once. Raises DataError for a damaged plan, and where none can be written.
    """
    is_cache = file.folder.parent.name in CACHE_FOLDER_NAMES
    return find_or_build(
        plan_name(file, seq_len),
        lambda path: open_plan(path, file, seq_len),
        lambda path: _build(path, file, seq_len),
        data_folder=file.folder.parent.parent if is_cache else file.folder,
        cache_folder=cache_folder,
        dump_folder=dump_folder,
    )


def plan_name(file: TokenFile, seq_len: int) -> str:
    """Of the file that holds the plan."""
    return f"{file.folder.name}-{file.meta.text_digest:016x}.best_fit-v{VERSION}-{seq_len}"


def open_plan(path: Path, file: TokenFile, seq_len: int) -> Plan | None:
    """Open the plan of ``file``; None where there is none. Takes milliseconds, whatever the size.

    Raises DataError where the file is there but is not what it should be.
    """
    key = _key(file, seq_len)
    try:
        header = np.fromfile(path, _WORD, len(key) + 2)
    except FileNotFoundError:
        return None
    size = path.stat().st_size
    num_samples, num_pieces = header[len(key) :].tolist() if len(header) == len(key) + 2 else (0, 0)
    first, behind = len(key) + 2, len(key) + 3 + num_samples
    if not np.array_equal(header[: len(key)], key) or size != (behind + num_pieces) * _WORD.itemsize:
        raise DataError(
            f"the packing plan {path} is damaged: it has {size:,} bytes and is not the plan of {file.folder} for samples "
            f"of {seq_len} tokens; delete it, it will be made again"
        )
    if not table_path(path).exists():
        return None  # an earlier version made it: it is made again, with hashes
    raw = RawFile(path)
    checked = CheckedFile(raw, HashTable(raw, f"delete {path}, it will be made again"))
    checked.verify(0)

    def words(start: int, count: int) -> CheckedArray:
        dtype = np.dtype(np.int64)
        return CheckedArray(checked, dtype, start * _WORD.itemsize, count, in_memory=True)

    return Plan(words(first, num_samples + 1), words(behind, num_pieces))


def make_plan(offsets: NDArray[np.uint64], seq_len: int) -> Plan:
    """Pack the documents between ``offsets`` (num_documents + 1,), as the head of this module says."""
    starts, lengths = _cut(offsets.view(np.int64), seq_len)
    longest_first = np.argsort((seq_len + 1 - lengths).astype(np.min_scalar_type(seq_len)), kind="stable")
    counts = np.bincount(lengths, minlength=seq_len + 2)
    del lengths
    sample = _best_fit(counts, seq_len + 1)
    num_samples = int(sample.max()) + 1
    # The longest piece of a sample is the first that was put into it: written last here, it stays.
    longest = np.empty(num_samples, np.int64)
    longest[sample[::-1]] = longest_first[::-1]
    place = np.empty(num_samples, np.int64)
    place[np.argsort(longest)] = np.arange(num_samples)
    in_text_order = np.empty_like(sample)
    in_text_order[longest_first] = place[sample]
    del sample, longest_first, longest, place
    first_pieces = np.zeros(num_samples + 1, np.int64)
    np.cumsum(np.bincount(in_text_order, minlength=num_samples), out=first_pieces[1:])
    return Plan(first_pieces, starts[np.argsort(in_text_order, kind="stable")])


def _cut(offsets: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First token and length of each piece of the documents, in the order of the text. Each has a label at least."""
    num_pieces = -(-(np.diff(offsets) - 1) // seq_len)
    before = np.cumsum(num_pieces) - num_pieces
    starts = np.repeat(offsets[:-1] - before * seq_len, num_pieces)
    starts += np.arange(len(starts)) * seq_len
    return starts, np.minimum(np.repeat(offsets[1:], num_pieces) - starts, seq_len + 1)


def _best_fit(counts: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The sample of each piece, (num_pieces,), from the longest to the shortest; counts[n] of them have n tokens.

    Among samples of equal room the one that was opened first is taken. Samples of equal room are handled as one: each gets
    as many pieces of the current length as it has room for, since what is left of it is then the tightest fit for the next.
    """
    sample_of = np.empty(counts.sum(), np.int64)
    fitting: list[tuple[int, NDArray[np.int64]]] = []  # heap of (room, samples), all of room for the current length
    too_small: dict[int, list[NDArray[np.int64]]] = defaultdict(list)  # room -> arrays of samples
    done = num_samples = 0
    last_line = time.monotonic()
    for length in range(capacity, 1, -1):
        if length in too_small:
            heappush(fitting, (length, np.sort(np.concatenate(too_small.pop(length)))))
        left = int(counts[length])
        while left:
            if fitting:
                room, samples = heappop(fitting)
            else:
                room, samples = capacity, num_samples + np.arange(-(-left // (capacity // length)))
                num_samples += len(samples)
            each = room // length
            placed = min(left, each * len(samples))
            num_full, in_last = divmod(placed, each)
            num_used = num_full + (in_last > 0)
            sample_of[done : done + placed] = np.repeat(samples[:num_used], each)[:placed]
            done, left = done + placed, left - placed
            for room_left, group in (
                (room - each * length, samples[:num_full]),
                (room - in_last * length, samples[num_full:num_used]),
                (room, samples[num_used:]),
            ):
                if len(group) and room_left >= length:
                    heappush(fitting, (room_left, group))
                elif len(group) and room_left > 1:
                    too_small[room_left].append(group)
        if time.monotonic() - last_line > PROGRESS_SECONDS:
            last_line = time.monotonic()
            logger.info(f"packing: {100 * done / len(sample_of):.0f}% of {len(sample_of):,} pieces")
    return sample_of


def _build(path: Path, file: TokenFile, seq_len: int) -> Plan:
    """Make the plan and write it."""
    started = time.monotonic()
    logger.info(
        f"packing the {file.meta.num_documents:,} documents of {file.folder} into samples of {seq_len:,} tokens"
    )
    plan = make_plan(file.offsets[:], seq_len)
    with written_with_hashes(path, "the packing plan") as stream:
        stream.write(np.array([*_key(file, seq_len), plan.num_samples, len(plan.starts)], _WORD).data)
        stream.write(plan.first_pieces[:].astype(_WORD).data)
        stream.write(plan.starts[:].astype(_WORD).data)
    num_labels = file.meta.num_tokens - file.meta.num_documents
    padding = 1 - (num_labels + len(plan.starts)) / (plan.num_samples * (seq_len + 1))
    logger.info(
        f"packed: {len(plan.starts):,} pieces in {plan.num_samples:,} samples, {100 * padding:.2f}% of them padding, "
        f"{time.monotonic() - started:.1f} s"
    )
    written = open_plan(path, file, seq_len)
    assert written is not None
    return written


def _key(file: TokenFile, seq_len: int) -> NDArray[np.uint64]:
    meta = file.meta
    return np.array([VERSION, seq_len, meta.num_tokens, meta.num_documents, meta.text_digest], np.uint64)


def _sums(row: NDArray[np.int64], values: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    return np.bincount(row, values, num_rows).astype(np.int64)
