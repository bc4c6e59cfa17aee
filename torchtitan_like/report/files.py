"""Read the files of a run directory. A missing or damaged file raises ValueError with its path."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.util.jsonl import decode
from torchtitan_like.util.reading import FINITE, INTEGER, NUMBER, TEXT, Kind, check_kinds
from torchtitan_like.util.run_directory import CONFIG, EVENTS, METRICS, read_config

Row = dict[str, Any]

MAX_ROWS = 1000
MAX_BYTES = 8 * 2**20  # that hold them; the file of a long run is much larger
METRICS_KEYS = ("step", "time", "n_tokens_seen", "grad_norm", "lr")  # in each row
METRICS_KINDS = {
    "step": INTEGER,
    "time": FINITE,
    "n_tokens_seen": INTEGER,
    **dict.fromkeys(("loss", "max_loss", "grad_norm", "lr"), NUMBER),
    **dict.fromkeys(("tps", "tflops", "mfu", "memory_gib"), NUMBER),
}
EVENT_KINDS = {"event": TEXT, "form": TEXT, "seconds": FINITE}


def read_run_config(run: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run. Raises ValueError if `run` has none."""
    try:
        return read_config(run)
    except OSError as error:
        raise ValueError(
            f"{run} is not the folder of a run: cannot read {run / CONFIG} ({error.strerror}). "
            "Expected a job.dump_folder. Correct the path."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{run / CONFIG} is damaged: {error}. Expected TOML, as the trainer writes it. "
            "Copy the file from the newest folder below attempts/."
        ) from error


def read_metrics(run: Path) -> list[Row]:
    """Return all complete rows of a run's metrics.jsonl. run: its folder, or the file.

    The last line may be half written. Raises ValueError if there is no row.
    """
    file = run / METRICS if run.is_dir() else run
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error.strerror}. Expected the metrics of a run. "
            "Give the folder of a run, or its metrics.jsonl."
        ) from error
    if not lines:
        raise ValueError(
            f"{file} has no step. Expected at least one. Wait until the run has finished it."
        )
    return _decode_rows(file, lines, METRICS_KINDS, METRICS_KEYS[:1])


def newest_metrics(run: Path, max_bytes: int = MAX_BYTES) -> list[Row]:
    """Return the last complete rows of a run's metrics.jsonl. See `newest_rows`."""
    return newest_rows(run / METRICS, METRICS_KINDS, METRICS_KEYS, max_bytes)


def newest_events(run: Path) -> list[Row]:
    """Return the last complete rows of a run's events.jsonl. See `newest_rows`."""
    return newest_rows(run / EVENTS, EVENT_KINDS, ("event",))


def newest_rows(
    file: Path, kinds: Mapping[str, Kind], keys: Sequence[str], max_bytes: int = MAX_BYTES
) -> list[Row]:
    """Return the last complete rows, oldest first; [] without a file.

    The last line may be half written. kinds: of the values that are read; keys: each row must have
    them. Raises OSError, and ValueError with the path of a damaged file.
    """
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            lines = stream.read().split(b"\n")[start > 0 : -1]
    except FileNotFoundError:
        return []
    return _decode_rows(file, lines[-MAX_ROWS:], kinds, keys)


def _decode_rows(
    file: Path, lines: Sequence[bytes], kinds: Mapping[str, Kind], keys: Sequence[str]
) -> list[Row]:
    rows = []
    for line in lines:
        try:
            row = decode(line)
            check_kinds(row, kinds)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file} is damaged at the line {line[:60]!r}: {error}. "
                "Expected one JSON object per line. Delete this line."
            ) from error
        missing = [key for key in keys if row.get(key) is None]
        if missing:
            raise ValueError(
                f"{file} has a row without {', '.join(missing)}: {line[:60]!r}. "
                "Expected the rows of this trainer. Give the folder of one of its runs."
            )
        rows.append(row)
    return rows


def step_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of each step whose previous step has a row too."""
    pairs = zip(rows, rows[1:], strict=False)
    return [b["time"] - a["time"] for a, b in pairs if b["step"] == a["step"] + 1]


def median_step_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median of `step_seconds`; None if no two rows are neighbors."""
    seconds = sorted(step_seconds(rows))
    return seconds[len(seconds) // 2] if seconds else None
