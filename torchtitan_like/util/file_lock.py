"""Exclusive locks on files (flock). The kernel releases a lock when its holder ends."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

POLL_SECONDS = 1.0


class LockWaitStopped(Exception):
    """The wait for a lock was stopped by another thread."""


@contextmanager
def file_lock(
    stream: IO[Any] | int,
    *,
    wait: bool = True,
    stop: threading.Event | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold an exclusive lock on an open file, or on the folder of a file descriptor.

    wait: False raises BlockingIOError if another process holds the lock. stop: an event that ends
    the wait with LockWaitStopped. on_wait: called once before waiting. Raises OSError if the file
    system has no locks.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        on_wait()
        _wait(stream, stop)
    try:
        yield
    finally:  # closing is not enough: a process forked since then has the file open too
        fcntl.flock(stream, fcntl.LOCK_UN)


def _wait(stream: IO[Any] | int, stop: threading.Event | None) -> None:
    if stop is None:
        fcntl.flock(stream, fcntl.LOCK_EX)
        return
    while not stop.wait(POLL_SECONDS):
        with suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    raise LockWaitStopped
