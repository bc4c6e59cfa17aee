"""Read the newest rows of a run's JSONL files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.util.jsonl import decode

Row = dict[str, Any]

MAX_ROWS = 1000
MAX_BYTES = 8 * 2**20  # that hold them; the file of a long run is much larger


def newest_rows(file: Path, max_bytes: int = MAX_BYTES) -> list[Row]:
    """Return the last complete rows, oldest first; [] without a file. Raises OSError, ValueError.

    The last line may be half written.
    """
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            lines = stream.read().split(b"\n")[start > 0 : -1]
    except FileNotFoundError:
        return []
    return [decode(line) for line in lines[-MAX_ROWS:]]


def step_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of each step that directly follows the one before it."""
    pairs = zip(rows, rows[1:], strict=False)
    return [b["time"] - a["time"] for a, b in pairs if b["step"] == a["step"] + 1]
