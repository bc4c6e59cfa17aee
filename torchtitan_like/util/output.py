"""Print to a stdout or stderr that may be on a full disk or a closed pipe.

A command whose output is its result ends if stdout cannot be written: see `checked_stdout`. The
launcher of a run continues: see `show`. Messages on stderr never change an exit code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from torchtitan_like.util.files import describe_os_error
from torchtitan_like.util.units import format_duration

# Between two lines of progress.
TERMINAL_SECONDS = 1
LOG_SECONDS = 10

# Control characters except tab and newline, with which a file could change the terminal, and bytes
# of file names that are not UTF-8, which no stream can encode.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace control characters and invalid UTF-8 with Python's escapes, such as `\\x1b`."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


class OutputError(BaseException):
    """Stdout cannot be written.

    This is not an Exception. So no handler mistakes it for an error of an input file, and logging
    does not drop it.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"Cannot write to stdout: {error.strerror}. Expected a pipe with a reader, or a disk "
            "with free space. Send the output elsewhere."
        )
        self.is_closed_pipe = isinstance(error, BrokenPipeError)


class _CheckedStream:
    """A text stream of `printable` text that raises OutputError if it cannot be written.

    unescaped: the same stream for a caller that controls the terminal.
    """

    def __init__(self, stream: TextIO, escape: Callable[[str], str] = printable) -> None:
        self._stream = stream
        self._escape = escape

    @property
    def unescaped(self) -> _CheckedStream:
        return _CheckedStream(self._stream, str)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(self._escape(text))
        except OSError as error:
            raise OutputError(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from None


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Raise OutputError as soon as stdout cannot be written, at the latest at the end.

    Text that could not be written is discarded, so that Python does not fail on it when it exits.
    """
    stream = sys.stdout
    checked = _CheckedStream(stream)
    sys.stdout = cast(TextIO, checked)
    try:
        try:
            yield
        finally:
            checked.flush()
    finally:
        sys.stdout = stream
        flush_or_discard(stream)


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


def show_error(text: str, end: str = "\n") -> None:
    """Print lines on stderr. Does nothing if its reader has ended or its disk is full."""
    _print(text, sys.stderr, end)


def show_problem(error: Exception) -> None:
    """Print the message of an expected error on stderr."""
    show_error(describe_os_error(error) if isinstance(error, OSError) else str(error))


class ProgressLine:
    """Prints how much is done, the rate and the time left, to stderr, once in a while.

    units: what is counted. amount: formats a number of them.
    """

    def __init__(self, units: str, amount: Callable[[float], str] = str) -> None:
        self._units = units
        self._amount = amount
        self._is_terminal = sys.stderr.isatty()
        self._printed_at = 0.0

    def __call__(self, phase: str, done: int, total: int, seconds: float) -> None:
        """Print a line if one is due. seconds: since the start of the phase."""
        is_end = done == total
        wait = TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS
        if total == 0 or (not is_end and 0 < done and seconds < self._printed_at + wait):
            return
        self._printed_at = seconds
        parts = [f"{self._amount(done)} of {self._amount(total)} {self._units}".rstrip()]
        parts.append(f"{done / total:.0%}")
        if done:
            rate = done / max(seconds, 1e-9)
            parts.append(f"{self._amount(round(rate, 2))}/s")
            parts.append(f"{format_duration((total - done) / rate)} left")
        end = "\r" if self._is_terminal and not is_end else "\n"
        show_error(f"{phase}: {', '.join(parts)}   ", end=end)


def flush_or_discard(stream: TextIO) -> None:
    """Write the buffer of `stream`, or discard it if that fails.

    Python flushes stdout when it exits. Text that cannot be written would replace the exit code.
    """
    try:
        stream.flush()
    except (OSError, OutputError):
        with suppress(OSError):  # a stream without a file, as in a test
            _discard(stream)


def _print(text: str, stream: TextIO, end: str = "\n") -> None:
    with suppress(OSError, OutputError):
        print(printable(text), file=stream, end=end)
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


def on_screen(text: str = "") -> dict[str, str]:
    """Return the `extra` of a log line that a terminal shows, with another text if it is given."""
    return {"screen_text": text}
