"""Read the JSONL files of a run, which may be damaged, torn, huge or still being written.

A line that cannot be used is skipped and reported; all others are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_like.util.jsonl import decode
from torchtitan_like.util.reading import FINITE, INTEGER, NUMBER, TEXT, Kind
from torchtitan_like.util.run_directory import CONFIG, EVENTS, METRICS, read_config

Row = dict[str, Any]

MAX_LINE = 2**24  # bytes; a longer line is damage
MAX_LISTED = 5  # line numbers in a problem
TAIL_BYTES = 2**18  # of the newest rows; the file of a long run is much larger
MAX_NEWEST = 1000  # rows

METRICS_KEYS = ("step", "time", "n_tokens_seen", "grad_norm", "lr")  # in each row
METRICS_KINDS = {
    "step": INTEGER,
    "time": FINITE,
    "n_tokens_seen": INTEGER,
    **dict.fromkeys(("loss", "max_loss", "grad_norm", "lr"), NUMBER),
    **dict.fromkeys(("tps", "tflops", "mfu", "memory_gib"), NUMBER),
}
EVENT_KINDS = {"event": TEXT}


@dataclass
class RowParser:
    """Parses the lines of one file, and counts the unusable ones by reason.

    keys: required in each row. kinds: expected type of each value that is read.
    """

    name: str
    keys: Sequence[str] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    num_lines: int = 0
    skipped: dict[str, list[int]] = field(default_factory=dict)

    def parse(self, line: bytes) -> Row | None:
        """Return the row of the next line of the file; None for an empty or unusable line."""
        self.num_lines += 1
        if not line.strip():
            return None
        try:
            return self._parse(line)
        except (TypeError, ValueError) as reason:
            self.skipped.setdefault(str(reason), []).append(self.num_lines)
            return None

    def _parse(self, line: bytes) -> Row:
        if not line.endswith(b"\n"):
            raise ValueError("incomplete" if len(line) < MAX_LINE else "too long")
        try:
            row = decode(line)
        except (TypeError, ValueError):
            raise ValueError("not a JSON object") from None
        if missing := [key for key in self.keys if row.get(key) is None]:
            raise ValueError(f"no {', '.join(missing)}")
        for key, kind in self.kinds.items():
            if row.get(key) is not None and not kind.accepts(row[key]):
                raise ValueError(f"{key} is not {kind.name}")
        return row

    def problems(self) -> list[str]:
        """Return one sentence for each reason."""
        return [
            f"{self.name}: skipped {len(numbers):,} of {self.num_lines:,} lines ({reason}): line "
            + ", ".join(map(str, numbers[:MAX_LISTED]))
            + (" ..." if len(numbers) > MAX_LISTED else "")
            for reason, numbers in self.skipped.items()
        ]


def read_rows(
    file: Path, keys: Sequence[str] = (), kinds: Mapping[str, Kind] | None = None
) -> tuple[list[Row], list[str]]:
    """Return the rows of a file and the problems. No file: no rows. See `RowParser`."""
    parser = RowParser(file.name, keys, kinds or {})
    rows: list[Row] = []
    try:
        with file.open("rb") as stream:
            rows += (row for line in limited_lines(stream) if (row := parser.parse(line)))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return rows, [*parser.problems(), f"{file.name}: cannot be read: {error.strerror}"]
    return rows, parser.problems()


def newest_metrics(run: Path) -> tuple[list[Row], list[str]]:
    """Return the last rows of a run's metrics.jsonl, and the problems. See `newest_rows`."""
    return newest_rows(run / METRICS, METRICS_KEYS, METRICS_KINDS)


def newest_events(run: Path) -> tuple[list[Row], list[str]]:
    """Return the last rows of a run's events.jsonl, and the problems. See `newest_rows`."""
    return newest_rows(run / EVENTS, ("event",), EVENT_KINDS)


def newest_rows(
    file: Path, keys: Sequence[str], kinds: Mapping[str, Kind], max_bytes: int = TAIL_BYTES
) -> tuple[list[Row], list[str]]:
    """Return the last rows of a file, oldest first, and the problems. No file: no rows.

    The last line may be half written.
    """
    parser = RowParser(f"end of {file.name}", keys, kinds)
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            lines = stream.read().splitlines(keepends=True)[start > 0 :]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{file.name}: cannot be read: {error.strerror}"]
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = [row for line in lines[-MAX_NEWEST:] if (row := parser.parse(line))]
    return rows, parser.problems()


def limited_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; at most `MAX_LINE` bytes of each, without a newline if cut."""
    while line := stream.readline(MAX_LINE):
        yield line
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE)


def read_run_config(run: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run. Raises ValueError if it cannot be used."""
    try:
        return read_config(run)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run / CONFIG} is damaged: {error}. Expected TOML, as the trainer writes it. "
            "Copy the file from the newest folder below attempts/."
        ) from error


def as_time(value: object) -> float | None:
    """Return a value of a row as seconds since 1970; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e12 else None
