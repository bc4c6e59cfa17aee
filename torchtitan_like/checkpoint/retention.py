"""Choose expired steps, and delete them in the background."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.checkpoint.step_folders import (
    StepFolder,
    numbered_folders,
    read_step,
    superseded_folders,
)
from torchtitan_like.util.run_directory import PIN

logger = logging.getLogger()

_TRASH = ".trash-"


class Expiry(NamedTuple):
    """The expired steps."""

    steps: list[tuple[int, Path]]  # oldest first
    newest_full: tuple[int, Path] | None
    oldest_of_newest: int | None  # number of the `keep_latest_k`-th newest step, if it exists


def find_expired(
    folders: Sequence[tuple[int, Path]],
    is_full: Callable[[int, Path], bool | None],
    keep_latest_k: int,
    keep_every: int = 0,
) -> Expiry:
    """Return the expired steps of `folders`, which are sorted from the oldest. 0 keeps all.

    Kept are the newest `keep_latest_k`, multiples of `keep_every`, pinned steps, step 0, and the
    newest full step. `is_full` returns None for an incomplete checkpoint, which is neither counted
    nor deleted. It reads files, so it is called as rarely as possible.
    """
    num_newest, oldest_of_newest = 0, None
    newest_full: tuple[int, Path] | None = None
    expired: list[tuple[int, Path]] = []
    if 0 < keep_latest_k <= len(folders):
        for number, path in reversed(folders):
            is_older = num_newest == keep_latest_k
            is_kept = number == 0 or (keep_every > 0 and number % keep_every == 0)
            if is_older and newest_full and (is_kept or (path / PIN).exists()):
                continue
            full = is_full(number, path)
            if full is None:
                continue
            if not is_older:
                num_newest, oldest_of_newest = num_newest + 1, number
            elif (newest_full or not full) and not is_kept and not (path / PIN).exists():
                expired.append((number, path))
            if full and newest_full is None:
                newest_full = number, path
    is_enough = num_newest == keep_latest_k
    return Expiry(expired[::-1], newest_full, oldest_of_newest if is_enough else None)


def newest_before(folder: Path, step: int) -> StepFolder | None:
    """Return the newest full step before `step`, except step 0, which is never deleted."""
    earlier = [(number, path) for number, path in numbered_folders(folder) if 0 < number < step]
    steps = (read_step(number, path) for number, path in reversed(earlier))
    return next((step for step in steps if step is not None and step.is_full), None)


def pin_before(folder: Path, step: int) -> Path | None:
    """Pin the newest full step before `step`. Returns its pin.

    Returns None if there is no such step or it is pinned already.
    """
    newest = newest_before(folder, step)
    if newest is None or (pin := newest.path / PIN).exists():
        return None
    pin.touch()
    logger.info(f"Pinned {newest.path}. To unpin it, remove its file {PIN}")
    return pin


class Retention:
    """Deletes expired steps of a folder in a thread. Use it only while holding the folder's lock.

    A step is renamed before it is deleted, so that an interrupted deletion never leaves a partial
    checkpoint. Failed deletions are retried after each checkpoint.
    """

    def __init__(self, folder: Path, *, keep_latest_k: int, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_latest_k = keep_latest_k
        self.keep_every = keep_every
        self._is_full_cache: dict[Path, bool | None] = {}  # values of `_is_full`
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="retention")

    def apply(self) -> list[int]:
        """Rename the expired steps and start their deletion. Returns their numbers.

        Each manifest is read once, so that the cost does not grow with the number of kept steps.
        The newest full step is read again before any deletion, because it may be damaged since.
        A superseded step expires when `keep_latest_k` complete steps have at least its number.
        """
        folders = numbered_folders(self.folder) if self.keep_latest_k else []
        present = {path for _, path in folders}
        self._is_full_cache = {
            path: full for path, full in self._is_full_cache.items() if path in present
        }
        expiry = self._find_expired(folders)
        if expiry.steps and expiry.newest_full is not None:
            self._is_full_cache.pop(expiry.newest_full[1])  # it may have been damaged since
            if not self._is_full(*expiry.newest_full):
                self._is_full_cache.clear()
                expiry = self._find_expired(folders)
        for number, path in expiry.steps:
            self._discard(number, path)
        if expiry.oldest_of_newest is not None:
            for number, path in superseded_folders(self.folder):
                if number <= expiry.oldest_of_newest and not (path / PIN).exists():
                    logger.info(f"Deleting {path}: newer checkpoints replace step {number}")
                    self._discard(number, path)
        self._deleter.submit(self._empty_trash)
        return [number for number, _ in expiry.steps]

    def _find_expired(self, folders: Sequence[tuple[int, Path]]) -> Expiry:
        return find_expired(folders, self._is_full, self.keep_latest_k, self.keep_every)

    def _is_full(self, number: int, path: Path) -> bool | None:
        if path not in self._is_full_cache:
            step = read_step(number, path)
            is_whole = step is not None and step.damage is None
            self._is_full_cache[path] = step.is_full if step is not None and is_whole else None
        return self._is_full_cache[path]

    def _discard(self, number: int, path: Path) -> None:
        candidates = (self.folder / f"{_TRASH}{number}{suffix}" for suffix in _suffixes())
        os.rename(path, next(trash for trash in candidates if not trash.exists()))

    def close(self) -> None:
        """Wait until all expired steps are deleted."""
        self._deleter.shutdown()

    def _empty_trash(self) -> None:
        for path in self.folder.glob(f"{_TRASH}*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning(
                    f"Could not delete {path}, retrying after the next checkpoint: {error}"
                )


def _suffixes() -> itertools.chain[str]:
    return itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
