"""Samples of ``seq_len`` tokens, cut from the documents laid end to end ("concat and split").

Sample i reads tokens [i * seq_len, i * seq_len + seq_len]: seq_len inputs, and as labels the same shifted by one.
The last token of a sample is thus the first of the next, and every token but the very first of the corpus is a
label exactly once. The last sample may be shorter: it is padded, and padding is never a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.tokens.token_file import TokenFile

PACKING = "concat-and-split, version 1"
NO_SAMPLE = -1  # a sample index that stands for nothing but padding

_NONE = np.empty(0, np.int64)

Samples: TypeAlias = "PackedSamples | JoinedSamples"


class PackedSamples:
    """The samples of a token file. Holds no token itself: samples are read from the file.

    num_samples, num_labels: of an epoch; num_labels counts those that are to be learned.
    """

    packing = PACKING

    def __init__(self, file: TokenFile, seq_len: int, *, mask_document_starts: bool) -> None:
        if file.meta.num_tokens < 2:
            raise DataError(
                f"the text of {file.folder} has {file.meta.num_tokens} token: expected 2 or more, an input and a label"
            )
        self.file, self.seq_len, self.mask_document_starts = file, seq_len, mask_document_starts
        self.dtype = file.tokens.dtype
        num_labels = file.meta.num_tokens - 1
        self.num_samples = -(-num_labels // seq_len)
        # The text's very first token is no label anyway.
        self.num_labels = num_labels - (file.meta.num_documents - 1 if mask_document_starts else 0)
        self._num_full = num_labels // seq_len

    def __str__(self) -> str:
        meta = self.file.meta
        return (
            f"({self.file.folder}): {meta.num_documents:,} documents, {meta.num_tokens:,} tokens = {self.num_samples:,} "
            f"samples of {self.seq_len:,} tokens per epoch"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What the text is known by."""
        meta = self.file.meta
        return {"text": f"{meta.text_digest:016x}", "num_documents": meta.num_documents, "num_tokens": meta.num_tokens}

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Tokens of ``samples`` (rows,) as (rows, seq_len + 1) of the file's type, and how many of each row are real, (rows,).

        The others are zero; ``NO_SAMPLE`` gives a row without a real one.
        """
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

    def ignored_labels(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The labels of ``samples`` (rows,) that begin a document, if those are masked: their rows and columns."""
        if not self.mask_document_starts:
            return _NONE, _NONE
        first_label = np.maximum(samples, 0) * self.seq_len + 1
        row, column = self._starts_within(first_label)
        real = samples[row] >= 0
        return row[real], column[real]

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each token of ``samples`` (rows,) the place in its document, (rows, seq_len); a document that goes on from the
        sample before begins anew. Padding continues the document before it.
        """
        return self._places(samples, *self._starts_within(np.maximum(samples, 0) * self.seq_len))

    def _places(
        self, samples: NDArray[np.int64], row: NDArray[np.int64], column: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """How far each token of ``samples`` stands behind the last of the places (row, column) before it."""
        begins = np.zeros((len(samples), self.seq_len), np.int64)
        begins[row, column] = column
        places: NDArray[np.int64] = np.arange(self.seq_len) - np.maximum.accumulate(begins, axis=1)
        return places

    def _starts_within(self, first: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents begin within ``seq_len`` tokens from each of ``first`` (rows,): rows, and how far behind it."""
        # The last offset is the end of the text and begins no document.
        offsets, num_documents = self.file.offsets, self.file.meta.num_documents
        low = np.minimum(offsets.searchsorted(first.astype(np.uint64)), num_documents)
        high = np.minimum(offsets.searchsorted((first + self.seq_len).astype(np.uint64)), num_documents)
        counts = high - low
        row = np.repeat(np.arange(len(first)), counts)
        document = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        return row, offsets[document].astype(np.int64) - first[row]


class JoinedSamples:
    """The samples of several sources, numbered on end: those of the first source, then those of the second, ..."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = tuple(parts)
        self.seq_len: int = parts[0].seq_len
        self.starts: NDArray[np.int64] = np.cumsum([0, *(part.num_samples for part in parts)])
        self.num_samples: int = int(self.starts[-1])
        self.dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in parts))

    def sources_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the source of each of ``samples``; of NO_SAMPLE that of the first."""
        return np.maximum(np.searchsorted(self.starts, samples, side="right") - 1, 0)

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """As `PackedSamples.read`."""
        if len(self.parts) == 1:
            return self.parts[0].read(samples)
        rows = np.zeros((len(samples), self.seq_len + 1), self.dtype)
        lengths = np.zeros(len(samples), np.int64)
        for part, mine, own in self._by_part(samples):
            rows[mine], lengths[mine] = part.read(own)
        return rows, lengths

    def ignored_labels(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `PackedSamples.ignored_labels`."""
        found = [(mine, *part.ignored_labels(own)) for part, mine, own in self._by_part(samples)]
        rows, columns = [mine[row] for mine, row, _ in found], [column for *_, column in found]
        return np.concatenate([_NONE, *rows]), np.concatenate([_NONE, *columns])

    def positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `PackedSamples.positions`."""
        positions = np.zeros((len(samples), self.seq_len), np.int64)
        for part, mine, own in self._by_part(samples):
            positions[mine] = part.positions(own)
        return positions

    def _by_part(self, samples: NDArray[np.int64]) -> list[tuple[Samples, NDArray[np.int64], NDArray[np.int64]]]:
        """Each source that is there: the rows of its samples, and their numbers in the source."""
        source = self.sources_of(samples)
        found = []
        for index in np.unique(source):
            mine = np.flatnonzero(source == index)
            own = np.where(samples[mine] == NO_SAMPLE, NO_SAMPLE, samples[mine] - self.starts[index])
            found.append((self.parts[index], mine, own))
        return found
