"""Looking at many files: by one rank for all, and without holding them open."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..token_file import map_file

T = TypeVar("T")
# Runs what it is given on one rank; what comes of it, or its error, is every rank's.
Once: TypeAlias = Callable[[Callable[[], T]], T]

MOST_MAPS = 256  # each takes a file descriptor, of which a process may have 1,024 and less is left


def alone(look: Callable[[], T]) -> T:
    """The `Once` of a process without peers."""
    return look()


def seen_once(once: Once[Any], path: str, look: Callable[[], T], is_here: Callable[[T], bool] = lambda _: True) -> T:
    """What ``look`` finds at ``path``: found by one rank for all, or thousands would ask one file server for each of thousands
    of files. A rank with another path, or for which what was found is not here, looks by itself: nodes may have their own
    copies.
    """
    place = os.path.abspath(path)
    where, found = once(lambda: (place, look()))
    return found if where == place and is_here(found) else look()


class MappedTokens:
    """Numbers in a file, as an array of one dimension. Mapped when they are read: of all, the last `MOST_MAPS` stay mapped.

    Raises DataError when the file is no longer the one that was looked at: a run would go on with other data.
    """

    def __init__(self, file: Path, dtype: np.dtype[Any], offset: int = 0) -> None:
        self.file, self.dtype, self._offset = file, dtype, offset
        self._version = _version(file)
        self._count = (self._version[0] - offset) // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._count * self.dtype.itemsize

    def __getitem__(self, where: Any) -> Any:
        return _mapped(self.file, self.dtype, self._offset, self._count, self._version)[where]

    def view(self, dtype: str) -> MappedTokens:
        """The same bytes as another type of the same size."""
        seen_as = copy(self)
        seen_as.dtype = np.dtype(dtype)
        return seen_as


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(MOST_MAPS)
def _mapped(file: Path, dtype: np.dtype[Any], offset: int, count: int, version: tuple[int, int]) -> NDArray[Any]:
    if _version(file) != version:
        raise DataError(f"{file} has changed since it was first looked at: put it back as it was, or start again")
    return map_file(file, dtype, offset, count)
