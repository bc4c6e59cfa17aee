"""Read small files from untrusted sources with bounded time and memory, and plain errors.

A FIFO never ends, `/dev/zero` never ends and fills memory, and text nested 100,000 deep exhausts
the stack of the parsers.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 2**28  # of a file that is read as a whole; the largest manifests have some 50 MB


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole regular file. Raises OSError: EISDIR, EINVAL for devices and pipes, EFBIG."""
    with open(path, "rb", opener=open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return content


def open_at_once(path: str, flags: int) -> int:
    """Open a FIFO without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a file like `read_file` and decode it. Also raises UnicodeDecodeError."""
    return read_file(path, max_bytes).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON like `json.loads`. Raises ValueError for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read and parse a JSON file. Raises OSError, ValueError."""
    return parse_json(read_file(path, max_bytes))


class Kind(NamedTuple):
    """A kind of value that a reader expects, with a name such as "an integer"."""

    name: str
    accepts: Callable[[Any], bool]


INTEGER = Kind("an integer of 64 bits", lambda value: type(value) is int and abs(value) < 2**63)
NUMBER = Kind("a number", lambda value: type(value) is float or INTEGER.accepts(value))
FINITE = Kind("a finite number", lambda value: NUMBER.accepts(value) and math.isfinite(value))
BOOLEAN = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", lambda value: type(value) is str)


def check_kinds(content: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raise ValueError for a value of the wrong kind. Missing keys and None are accepted."""
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and not kind.accepts(value):
            raise ValueError(f"{key} is {str(value)[:40]!r}, not {kind.name}")
