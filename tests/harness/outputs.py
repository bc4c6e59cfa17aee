"""Outputs that a process cannot write to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_pipe() -> Iterator[int]:
    """Yield the file descriptor of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextmanager
def full_disk() -> Iterator[int]:
    """Yield the file descriptor of a file on a disk without space."""
    with open("/dev/full", "wb") as file:
        yield file.fileno()
