"""Looking at many files: by one rank for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# Runs what it is given on one rank; what comes of it, or its error, is every rank's.
Once: TypeAlias = Callable[[Callable[[], T]], T]


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
