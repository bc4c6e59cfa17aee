"""Several files of tokens as one long array, which is never put together: what is read is copied, and checked.

Which ids a file holds is not known until they are read, and reading all of a terabyte at the start is out of the
question. So every id that is handed out is compared with the vocabulary: none beyond it reaches the embedding.
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
    """One file of tokens, perhaps with an index beside it. Can be pickled.

    tokens: (num_tokens,) integers. files: all that it is read from, the tokens first. starts(eos_id):
    where its documents begin, empty ones too, as chunks of int64 that never fall; checks the index on the way. is_flat:
    there is no index: documents end at ``eos_id``, without one the file is a document. offsets:
    the same as a
    finished array, (num_documents + 1,) uint64, where there is one.
    """

    tokens: CheckedArray
    files: tuple[Path, ...]
    starts: Callable[[int | None], Iterator[NDArray[np.int64]]]
    is_flat: bool = False
    offsets: CheckedArray | None = None


class TokenStream:
    """The tokens of ``parts`` laid end to end: len(), slices of step 1, arrays of places, and rows, as copies.

    dtype: unsigned, the widest of the parts'. vocabulary: whose tokens they are, for messages. Reading raises DataError,
    with file and place, for an id that is negative or not below ``vocab_size``.
    """

    def __init__(self, parts: Sequence[TokenPart], vocab_size: int, vocabulary: str) -> None:
        self.parts = tuple(parts)
        # Seen as unsigned, a negative id is a large one: one comparison finds both.
        self._tokens = [part.tokens.view(f"<u{part.tokens.dtype.itemsize}") for part in parts]
        self.dtype = max((tokens.dtype for tokens in self._tokens), key=lambda dtype: dtype.itemsize)
        self.starts: list[int] = [0, *np.cumsum([len(tokens) for tokens in self._tokens]).tolist()]
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
        self._may_exceed = vocab_size < 2 ** (8 * self.dtype.itemsize)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, where: slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            assert step == 1, step
            row: NDArray[Any] = self.rows(np.array([start]), max(stop - start, 0))[0]
            return row
        places = where.ravel()
        part_of = np.searchsorted(self.starts, places, side="right") - 1
        ids = np.empty(places.shape, self.dtype)
        for part in np.unique(part_of).tolist():
            chosen = part_of == part
            ids[chosen] = self._tokens[part][places[chosen] - self.starts[part]]
        self._check(ids, lambda index: int(places[index]))
        return ids.reshape(where.shape)

    def rows(self, first: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Tokens [first, first + length) of each of ``first`` (rows,), as (rows, length)."""
        rows = np.empty((len(first), length), self.dtype)
        for row, place in zip(rows, first.tolist(), strict=True):
            self._copy(row, place)
        self._check(rows, lambda index: int(first[index // length]) + index % length)
        return rows

    def fill(self, out: NDArray[Any], first: int) -> None:
        """Fill ``out`` with the tokens from index ``first`` on."""
        self._copy(out, first)
        self._check(out, lambda index: first + index)

    def _copy(self, row: NDArray[Any], place: int) -> None:
        """Fill ``row`` with the tokens from ``place`` on, through as many parts as it takes."""
        part, filled = bisect_right(self.starts, place) - 1, 0
        while filled < len(row):
            tokens, inside = self._tokens[part], place + filled - self.starts[part]
            count = min(len(row) - filled, len(tokens) - inside)
            if tokens.dtype == row.dtype:
                tokens.fill(row[filled : filled + count], inside)
            else:
                row[filled : filled + count] = tokens[inside : inside + count]
            filled += count
            part += 1

    def _check(self, ids: NDArray[Any], place_of: Callable[[int], int]) -> None:
        """``place_of``: where in the stream the token at a (flat) index of ``ids`` stands."""
        if not self._may_exceed or not ids.size or int(ids.max()) < self._vocab_size:
            return
        place = place_of(int(np.argmax(ids.ravel() >= self._vocab_size)))
        part = bisect_right(self.starts, place) - 1
        tokens, inside = self.parts[part].tokens, place - self.starts[part]
        raise DataError(
            f"{self.parts[part].files[0]}: token {inside:,} (counted from 0) is {tokens[inside]}; expected ids from 0 to "
            f"{self._vocab_size - 1}, the vocabulary of {self._vocabulary}: name the tokenizer that the file was made with, "
            f"or mend the file, if its ids are no {tokens.dtype.name} (flat .bin files: set the source's `token_dtype`)"
        )


Tokens: TypeAlias = "CheckedArray | TokenStream"
