"""Write the files of one attempt: its configuration, environment and events.

`torchtitan_like.util.run_directory` documents the whole run directory and reads it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.monitor.environment import write_environment
from torchtitan_like.monitor.log import add_file, logger
from torchtitan_like.util import run_directory
from torchtitan_like.util.credentials import mask_values
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import (
    AppendOnlyFile,
    WriteFailures,
    storage_error,
    write_atomically,
)
from torchtitan_like.util.jsonl import encode
from torchtitan_like.util.output import on_screen

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig
    from torchtitan_like.distributed.world import World


class Attempt:
    """One start of the job, of all its ranks together: ``attempts/<n>`` in the run directory.

    ``number=None`` makes the folder of the next free number, on rank 0 alone. Other ranks pass the
    number of rank 0 and make nothing. Only rank 0 calls the methods that write.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        number: int | None = None,
        wall_clock: Callable[[], float] = time.time,
        failures: WriteFailures | None = None,
    ) -> None:
        self.run = Path(run)
        self._wall_clock = wall_clock
        self.failures = WriteFailures() if failures is None else failures
        self._events = AppendOnlyFile(self.run / run_directory.EVENTS)
        if number is None:
            number = _make_folder(self.run)
            _end_last_line(self._events.path)
            _remove_unfinished(self.run, number - 1)
        self.number = number
        self.folder = run_directory.attempt_folder(self.run, number)

    def write_config(self, toml_text: str) -> None:
        """Write the resolved configuration of this attempt, and the same as the newest of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / run_directory.CONFIG, toml_text)
        write_atomically(self.run / run_directory.CONFIG, toml_text)

    def capture_environment(self) -> threading.Thread:
        """Write ``environment/`` in a thread: git and a slow disk must not delay the first step.

        Python joins the thread at exit. A failed write is recorded in the failures of the run. Any
        other error is logged as a warning and does not end the run.
        """
        folder = self.folder / run_directory.ENVIRONMENT

        def capture() -> None:
            try:
                with self.failures.recording(folder):
                    write_environment(folder)
            except Exception as error:
                logger.warning(f"The environment could not be recorded in {self.folder}: {error!r}")

        thread = threading.Thread(target=capture, name="environment")
        thread.start()
        return thread

    def event(self, kind: str, **fields: object) -> None:
        """Append one line to events.jsonl: ``{"event": kind, "time": seconds, "attempt": n, ...}``."""
        row = {"event": kind, "time": self._wall_clock(), "attempt": self.number, **fields}
        with self.failures.recording(self._events.path):
            self._events.append(encode(row))
            self._events.close()

    def end(self, code: ExitCode, cause: str, step: int, *, is_leader: bool) -> None:
        """Log why training ends. The leader also writes the event `stop`."""
        if is_leader:
            self.event("stop", reason=code.reason, cause=cause, code=int(code), step=step)
        is_done = code is ExitCode.DONE
        logger.info(
            "Training completed" if is_done else f"Training stopped: {code.reason} ({cause})",
            extra=on_screen(),
        )

    def remove_exit(self) -> None:
        """Remove the exit.json of the previous attempt: the file always describes the newest one."""
        (self.run / run_directory.EXIT).unlink(missing_ok=True)


def open_attempt(
    config: JobConfig, config_toml: str, world: World, failures: WriteFailures
) -> Attempt:
    """Create the folder of this attempt, write its configuration, and log to it. A collective.

    config_toml: the configuration as TOML, with masked secrets.
    Raises StorageError on every rank if rank 0 cannot write.
    """
    run = config.job.dump_folder

    def make() -> int:
        with storage_error(run):
            attempt = Attempt(run)
            attempt.write_config(config_toml)
            if name := config.job.save_config_file:
                masked = mask_values(config.model_dump())
                (attempt.run / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(attempt.run / name, json.dumps(masked, indent=2))
            attempt.remove_exit()
            return attempt.number

    number = world.step_group.run_on_leader(make)
    attempt = Attempt(run, number, failures=failures)
    if world.rank == 0:
        attempt.capture_environment()
    add_file(run_directory.log_file(attempt.folder, world.rank), failures)
    return attempt


def _make_folder(run: Path) -> int:
    """Make the folder of the next free attempt and return its number."""
    (run / run_directory.ATTEMPTS).mkdir(parents=True, exist_ok=True)
    newest = run_directory.newest_attempt(run)
    number = 1 if newest is None else int(newest.name) + 1
    while True:
        try:
            run_directory.attempt_folder(run, number).mkdir()
            return number
        except FileExistsError:  # another start of the same job was faster
            number += 1


def _end_last_line(path: Path) -> None:
    """Complete the last line with a newline if a killed writer left half of it."""
    if path.exists() and path.stat().st_size > 0:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _remove_unfinished(run: Path, previous: int) -> None:
    """Remove the temporary files of `atomic_file` that a kill of the previous attempt left."""
    attempt = f"{run_directory.ATTEMPTS}/{previous}"
    starts = f"{run_directory.ATTEMPTS}/0"
    for pattern in ("*", f"{attempt}/*", f"{attempt}/*/*", f"{starts}/*/*"):
        for path in run.glob(f"{pattern}.tmp-[0-9]*"):
            if path.is_file():
                path.unlink(missing_ok=True)
