"""Print without changing the exit code, even if stdout or stderr cannot be written."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def open_closed_streams() -> None:
    """Open /dev/null as stdout and stderr if they were closed before Python started.

    Libraries expect both. Another file could get the number of a closed one, and child processes
    would write into it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, "w"))


def show(text: str) -> None:
    """Print lines on stdout. Does nothing if its reader has ended or its disk is full."""
    _print(text, sys.stdout)


def show_error(text: str) -> None:
    """Print lines on stderr. Does nothing if its reader has ended or its disk is full."""
    _print(text, sys.stderr)


def flush_or_discard(stream: TextIO) -> None:
    """Write the buffer of `stream`, or discard it if that fails.

    Python flushes stdout when it exits. Text that cannot be written would replace the exit code.
    """
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file, as in a test
            _discard(stream)


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(text, file=stream)
    flush_or_discard(stream)


def _discard(stream: TextIO) -> None:
    """Flush into /dev/null. The ranks keep the file, whose disk may have room again later."""
    number = stream.fileno()
    original = os.dup(number)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), number)
    stream.flush()
    os.dup2(original, number)
    os.close(original)
