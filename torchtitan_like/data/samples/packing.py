"""Samples of ``seq_len`` tokens, split from the concatenated documents ("concat and split").

Sample i reads the tokens [i * seq_len, i * seq_len + seq_len]: seq_len inputs, and the same tokens
shifted by one as labels. The last token of a sample is the first token of the next one. Every token
except the first one of the corpus is therefore a label exactly once. The last sample may be
shorter: it is padded, and padding is never a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.tokens.token_file import NOT_TRAINED, TokenFile

PACKING = "concat-and-split, version 1"
NO_SAMPLE = -1  # the sample index of a row that is only padding

_NONE = np.empty(0, np.int64)

Samples: TypeAlias = "PackedSamples | JoinedSamples"
Indices2d = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows and columns of some elements


class PackedSamples:
    """The samples of a token file. The tokens remain in the file until a sample is read.

    num_samples, num_labels: per epoch. num_labels does not count ignored labels.
    """

    packing = PACKING

    def __init__(self, file: TokenFile, seq_len: int, *, mask_document_starts: bool) -> None:
        if file.meta.num_tokens < 2:
            raise DataError(
                f"the text of {file.folder} has {file.meta.num_tokens} token. Expected 2 or more, "
                "an input and a label: give more text"
            )
        self.file = file
        self.seq_len = seq_len
        self.mask_document_starts = mask_document_starts
        self.dtype = file.tokens.dtype
        num_labels = file.meta.num_tokens - 1
        self.num_samples = -(-num_labels // seq_len)
        # The first token of the dataset is never a label.
        self.num_labels = num_labels - (file.meta.num_documents - 1 if mask_document_starts else 0)
        self._num_full = num_labels // seq_len

    def __str__(self) -> str:
        meta = self.file.meta
        return (
            f"({self.file.folder}): {meta.num_documents:,} documents, {meta.num_tokens:,} tokens = "
            f"{self.num_samples:,} samples of {self.seq_len:,} tokens per epoch"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify the dataset, by name."""
        meta = self.file.meta
        return {
            "text": f"{meta.text_digest:016x}",
            "num_documents": meta.num_documents,
            "num_tokens": meta.num_tokens,
        }

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens of ``samples`` (rows,) and the number of tokens in each row (rows,).

        The tokens are (rows, seq_len + 1) in the file's dtype, padded with zeros. A row of
        ``NO_SAMPLE`` is only padding.
        """
        rows, lengths = self._read(samples)
        return rows & ~NOT_TRAINED if self.file.has_masks else rows, lengths

    def _read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Read tokens as `read` does, with the marks of masked tokens."""
        lengths = np.full(samples.shape, self.seq_len + 1, np.int64)
        full = (samples >= 0) & (samples < self._num_full)
        if full.all():
            return self.file.tokens.rows(samples * self.seq_len, self.seq_len + 1), lengths
        rows = np.zeros((len(samples), self.seq_len + 1), self.file.tokens.dtype)
        rows[full] = self.file.tokens.rows(samples[full] * self.seq_len, self.seq_len + 1)
        tail = self.file.tokens[self._num_full * self.seq_len :]
        is_tail = samples == self._num_full
        rows[is_tail, : len(tail)] = tail
        lengths[~full] = 0
        lengths[is_tail] = len(tail)
        return rows, lengths

    def ignored_labels(self, samples: NDArray[np.int64]) -> Indices2d:
        """Return rows and columns of the labels of ``samples`` (rows,) that are ignored.

        These are the first tokens of documents if `mask_document_starts` is set, and the tokens
        that a sample processor has masked. No position is returned twice.
        """
        row, column = self._ignored_starts(samples)
        if not self.file.has_masks:
            return row, column
        rows, _ = self._read(samples)
        is_ignored = rows[:, 1:] & NOT_TRAINED != 0
        is_ignored[row, column] = True
        masked_row, masked_column = np.nonzero(is_ignored)
        return masked_row, masked_column

    def _ignored_starts(self, samples: NDArray[np.int64]) -> Indices2d:
        """Return rows and columns of the labels that start a document and are ignored."""
        if not self.mask_document_starts:
            return _NONE, _NONE
        first_label = np.maximum(samples, 0) * self.seq_len + 1
        row, column = self._document_starts(first_label)
        is_label = samples[row] >= 0
        return row[is_label], column[is_label]

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position (rows, seq_len) of each token of ``samples`` (rows,) in its document.

        Positions restart at 0 in each sample. Padding continues the document before it.
        """
        starts = self._document_starts(np.maximum(samples, 0) * self.seq_len)
        return self._positions_since(samples, *starts)

    def _positions_since(
        self, samples: NDArray[np.int64], row: NDArray[np.int64], column: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the distance of each token of ``samples`` from the last start (row, column)."""
        starts = np.zeros((len(samples), self.seq_len), np.int64)
        starts[row, column] = column
        last_starts = np.maximum.accumulate(starts, axis=1)
        positions: NDArray[np.int64] = np.arange(self.seq_len) - last_starts
        return positions

    def _document_starts(self, first: NDArray[np.int64]) -> Indices2d:
        """Return the documents that start within ``seq_len`` tokens from each of ``first`` (rows,).

        The result is the row and the distance from ``first`` of each start.
        """
        # The last offset is the end of the dataset and starts no document.
        offsets, num_documents = self.file.offsets, self.file.meta.num_documents
        low = np.minimum(offsets.searchsorted(first.astype(np.uint64)), num_documents)
        high = np.minimum(
            offsets.searchsorted((first + self.seq_len).astype(np.uint64)), num_documents
        )
        counts = high - low
        row = np.repeat(np.arange(len(first)), counts)
        document = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        return row, offsets[document].astype(np.int64) - first[row]


class JoinedSamples:
    """The samples of several sources with consecutive numbers: first source, second source, ..."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = tuple(parts)
        self.seq_len: int = parts[0].seq_len
        self.starts: NDArray[np.int64] = np.cumsum([0, *(part.num_samples for part in parts)])
        self.num_samples: int = int(self.starts[-1])
        self.dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in parts))

    def sources_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each sample's source; 0 for NO_SAMPLE."""
        return np.maximum(np.searchsorted(self.starts, samples, side="right") - 1, 0)

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `PackedSamples.read`."""
        if len(self.parts) == 1:
            return self.parts[0].read(samples)
        rows = np.zeros((len(samples), self.seq_len + 1), self.dtype)
        lengths = np.zeros(len(samples), np.int64)
        for part, part_rows, part_samples in self._by_part(samples):
            rows[part_rows], lengths[part_rows] = part.read(part_samples)
        return rows, lengths

    def ignored_labels(self, samples: NDArray[np.int64]) -> Indices2d:
        """See `PackedSamples.ignored_labels`."""
        if len(self.parts) == 1:
            return self.parts[0].ignored_labels(samples)
        rows, columns = [_NONE], [_NONE]
        for part, part_rows, part_samples in self._by_part(samples):
            row, column = part.ignored_labels(part_samples)
            rows.append(part_rows[row])
            columns.append(column)
        return np.concatenate(rows), np.concatenate(columns)

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `PackedSamples.positions`."""
        positions = np.zeros((len(samples), self.seq_len), np.int64)
        for part, part_rows, part_samples in self._by_part(samples):
            positions[part_rows] = part.positions(part_samples)
        return positions

    def _by_part(
        self, samples: NDArray[np.int64]
    ) -> list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]]:
        """Return, for each source of ``samples``, rows and sample numbers in the source."""
        source = self.sources_of(samples)
        groups = []
        for index in np.unique(source):
            rows = np.flatnonzero(source == index)
            is_padding = samples[rows] == NO_SAMPLE
            part_samples = np.where(is_padding, NO_SAMPLE, samples[rows] - self.starts[index])
            groups.append((self.parts[index], rows, part_samples))
        return groups
