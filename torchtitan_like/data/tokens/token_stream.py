"""Several token files as one long array, without copying them together.

A start cannot read a terabyte to check all ids. Every id is therefore compared with the vocabulary
when it is read: no id outside the vocabulary reaches the embedding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchtitan_like.data.errors import DataError
from torchtitan_like.data.tokens.checked_file import CheckedArray


@dataclass(frozen=True)
class TokenPart:
    """A token file, with its index if it has one. Can be pickled.

    tokens: (num_tokens,) integers.
    files: the file of the tokens, then the file of the index.
    starts(eos_id): yields the first token of each document, empty ones included, as non-decreasing
        chunks of int64. It checks the index.
    is_flat: the file has no index. Documents end at ``eos_id``; None: the file is one document.
    offsets: (num_documents + 1,) uint64, the starts as an array, if one exists.
    """

    tokens: CheckedArray
    files: tuple[Path, ...]
    starts: Callable[[int | None], Iterator[NDArray[np.int64]]]
    is_flat: bool = False
    offsets: CheckedArray | None = None


class TokenStream:
    """The concatenated tokens of ``parts``.

    Supports len(), slices of step 1 and arrays of indices, which return copies. Reading raises
    DataError, with file and index, for an id that is negative or not below ``vocab_size``.

    dtype: unsigned, the widest dtype of the parts.
    vocabulary: the tokenizer's name, for messages.
    """

    def __init__(self, parts: Sequence[TokenPart], vocab_size: int, vocabulary: str) -> None:
        self.parts = tuple(parts)
        # As unsigned integers, negative ids are large: one comparison detects both errors.
        self._tokens = [part.tokens.view(f"<u{part.tokens.dtype.itemsize}") for part in parts]
        self.dtype = max(
            (tokens.dtype for tokens in self._tokens), key=lambda dtype: dtype.itemsize
        )
        self.starts: list[int] = [0, *np.cumsum([len(tokens) for tokens in self._tokens]).tolist()]
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._may_exceed = vocab_size < 2 ** (8 * self.dtype.itemsize)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, key: slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, step
            row: NDArray[Any] = self.rows(np.array([start]), max(stop - start, 0))[0]
            return row
        indices = key.ravel()
        part_of = np.searchsorted(self.starts, indices, side="right") - 1
        ids = np.empty(indices.shape, self.dtype)
        for part in np.unique(part_of).tolist():
            in_part = part_of == part
            ids[in_part] = self._tokens[part][indices[in_part] - self.starts[part]]
        self._check(ids, lambda flat_index: int(indices[flat_index]))
        return ids.reshape(key.shape)

    def rows(self, first: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Return [first, first + length) for each of ``first`` (rows,), as (rows, length)."""
        rows = np.empty((len(first), length), self.dtype)
        for row, start in zip(rows, first.tolist(), strict=True):
            self._copy(row, start)
        self._check(rows, lambda index: int(first[index // length]) + index % length)
        return rows

    def fill(self, out: NDArray[Any], first: int) -> None:
        """Fill ``out`` with the tokens from index ``first`` on."""
        self._copy(out, first)
        self._check(out, lambda index: first + index)

    def _copy(self, row: NDArray[Any], start: int) -> None:
        """Fill ``row`` with the tokens from ``start`` on, across parts."""
        part = bisect_right(self.starts, start) - 1
        num_filled = 0
        while num_filled < len(row):
            tokens = self._tokens[part]
            offset = start + num_filled - self.starts[part]
            count = min(len(row) - num_filled, len(tokens) - offset)
            if tokens.dtype == row.dtype:
                tokens.fill(row[num_filled : num_filled + count], offset)
            else:
                row[num_filled : num_filled + count] = tokens[offset : offset + count]
            num_filled += count
            part += 1

    def _check(self, ids: NDArray[Any], stream_index: Callable[[int], int]) -> None:
        """Raise DataError for an id outside the vocabulary.

        stream_index: maps a flat index of ``ids`` to an index of the stream.
        """
        if not self._may_exceed or not ids.size or int(ids.max()) < self._vocab_size:
            return
        index = stream_index(int(np.argmax(ids.ravel() >= self._vocab_size)))
        part = bisect_right(self.starts, index) - 1
        tokens = self.parts[part].tokens
        offset = index - self.starts[part]
        raise DataError(
            f"{self.parts[part].files[0]}: token {offset:,} (counted from 0) is {tokens[offset]}. "
            f"Expected ids from 0 to {self._vocab_size - 1}, the vocabulary of {self._vocabulary}: "
            "give the tokenizer of the file, or, if its ids are not "
            f"{tokens.dtype.name}, correct the file (for a flat .bin: the source's `token_dtype`)"
        )


Tokens: TypeAlias = "CheckedArray | TokenStream"
