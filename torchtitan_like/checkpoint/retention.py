"""Which published steps may go, and their deletion in the background."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_like.checkpoint.step_folders import StepFolder, published_steps

logger = logging.getLogger()

PIN = "PIN"  # a file of this name inside `step-N` keeps it for ever; who wants to keep it for good may write why
_TRASH = ".trash-"


def doomed(steps: Sequence[StepFolder], keep_latest_k: int, keep_every: int = 0) -> list[StepFolder]:
    """Those of the complete `steps`, oldest first, that are not to be kept. `keep_latest_k` 0 keeps all.

    Kept are the newest `keep_latest_k`, multiples of `keep_every`, pinned ones, step 0 (what the run began from) and the
    newest full one, without which no run could go on.
    """
    newest_full = max((step.step for step in steps if step.is_full), default=None)
    return [
        old
        for old in (steps[:-keep_latest_k] if keep_latest_k else ())
        if old.step not in (0, newest_full)
        and not (keep_every and old.step % keep_every == 0)
        and not (old.path / PIN).exists()
    ]


def newest_before(folder: Path, step: int) -> StepFolder | None:
    """The newest full step before `step`, leaving out step 0, which is always kept."""
    return next((found for found in reversed(published_steps(folder)) if found.is_full and 0 < found.step < step), None)


def pin_before(folder: Path, step: int) -> Path | None:
    """Pin the newest full step before `step`; the PIN, None when there is no such step or it is pinned already."""
    newest = newest_before(folder, step)
    if newest is None or (pin := newest.path / PIN).exists():
        return None
    pin.touch()
    logger.info(f"Pinned {newest.path}: it stays until its file {PIN} is removed")
    return pin


class Retention:
    """Deletes old steps of one folder without making a step wait. Only for the holder of the folder's lock.

    A step is renamed out of sight first, so that a deletion cut short never leaves half a checkpoint; what could not
    be deleted, now or by an earlier run, is tried again each time.
    """

    def __init__(self, folder: Path, *, keep_latest_k: int, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_latest_k = keep_latest_k
        self.keep_every = keep_every
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="retention")

    def apply(self) -> list[int]:
        """Put the doomed steps out of sight and have them deleted; their numbers."""
        gone = []
        for old in doomed(published_steps(self.folder), self.keep_latest_k, self.keep_every):
            names = (f"{_TRASH}{old.step}{suffix}" for suffix in _suffixes())
            os.rename(old.path, next(path for name in names if not (path := self.folder / name).exists()))
            gone.append(old.step)
        self._deleter.submit(self._empty_trash)
        return gone

    def close(self) -> None:
        """Wait until everything is deleted."""
        self._deleter.shutdown()

    def _empty_trash(self) -> None:
        for path in self.folder.glob(f"{_TRASH}*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning(f"{path} could not be deleted, and is tried again after the next save: {error}")


def _suffixes() -> itertools.chain[str]:
    return itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
