"""Write metrics.jsonl and validation.jsonl, which hold all numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.monitor.log import logger
from torchtitan_like.util import run_directory
from torchtitan_like.util.files import StorageError, WriteFailures, storage_error
from torchtitan_like.util.jsonl import JsonlFile

if TYPE_CHECKING:
    from torchtitan_like.monitor.rows import Row

REPLAY_KEYS = ("position", "rank_losses")  # stored only for skipped steps


class FileEnd(NamedTuple):
    """Size of metrics.jsonl in bytes, with the step and data_digest_chain of its last row."""

    num_bytes: int
    step: int | None
    chain: str | None

    def __str__(self) -> str:
        return (
            f"{self.num_bytes} bytes, the last row of step {self.step} "
            f"with data_digest_chain {self.chain}"
        )


class RowFiles:
    """metrics.jsonl and validation.jsonl in a run directory. Rank 0 alone writes them.

    folder: the run directory. attempt: number of this start of the job.
    """

    def __init__(self, folder: Path, attempt: int, failures: WriteFailures) -> None:
        self._folder = folder
        self._attempt = attempt
        self._steps = JsonlFile(folder / run_directory.METRICS, failures)
        self._validation = JsonlFile(folder / run_directory.VALIDATION, failures)

    def append_steps(self, rows: Sequence[Row]) -> None:
        """Append rows to metrics.jsonl."""
        self._steps.append([_stored(row) for row in rows])

    def append_validation(self, row: Row) -> None:
        """Append a row to validation.jsonl."""
        self._validation.append([row])

    def sync(self) -> int:
        """Return the size of metrics.jsonl once it is on disk, or 0 if it cannot be written."""
        return self._steps.byte_offset()

    def check_written(self) -> None:
        """Raise StorageError if rows of past steps are not on disk."""
        try:
            self._validation.require_all()
            self._steps.sync()
        except OSError as error:
            raise StorageError(
                f"The rows of past steps cannot be written: {error}. A checkpoint is published "
                "only after the rows of its steps are on disk, so no checkpoint was saved. "
                "Free space or repair the disk, then start the run again: it repeats the steps "
                "since the last checkpoint"
            ) from error

    def rewind(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Move the rows beyond `step` to `*.discarded-<attempt>.jsonl`. No step occurs twice then.

        saved: summary of the checkpoint of `step`, if it belongs to this run directory. Logs a
        warning if it describes another metrics.jsonl. Raises StorageError.
        """
        for file in (self._steps, self._validation):
            discarded = self._folder / f"{file.path.stem}.discarded-{self._attempt}.jsonl"
            with storage_error(self._folder):
                num_moved = file.rewind(step, discarded)
            if num_moved:
                logger.info(
                    f"Moved {num_moved} rows beyond step {step} "
                    f"from {file.path.name} to {discarded.name}"
                )
        if saved and saved.get("metrics_bytes") and "digest_chain" in saved:
            self._compare(FileEnd(saved["metrics_bytes"], step, f"{saved['digest_chain']:016x}"))

    def close(self) -> None:
        """Write all buffered rows, if possible, and close the files."""
        self._steps.close()
        self._validation.close()

    def _compare(self, expected: FileEnd) -> None:
        """Log a warning if metrics.jsonl ends differently: another run wrote or changed it."""
        size, row = self._steps.size_and_last_row()
        actual = FileEnd(size, row.get("step"), row.get("data_digest_chain"))
        if actual != expected:
            logger.warning(
                f"{self._steps.path} is not the file that this run wrote: it has {actual}. "
                f"The checkpoint of step {expected.step} expects {expected}. New rows are appended "
                "to the file. Look for missing rows in metrics.discarded-*.jsonl"
            )


def _stored(row: Row) -> Row:
    """Return a row as metrics.jsonl stores it."""
    if row["skipped"]:
        return row
    return {key: value for key, value in row.items() if key not in REPLAY_KEYS}
