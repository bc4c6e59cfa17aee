"""The run directory explains itself: configuration, attempts, events and how the run ended, in plain files.

Below ``job.dump_folder``: config.toml, attempts/<n>/config.toml, attempts/<n>/environment/, events.jsonl, exit.json.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan_like.monitor.environment import write_environment
from torchtitan_like.monitor.jsonl import encode
from torchtitan_like.monitor.log import logger
from torchtitan_like.util.files import AppendOnlyFile, StorageError, WriteFailures, write_atomically

EXIT = "exit.json"
LAUNCHER_FOLDER = "TORCHTITAN_LIKE_LAUNCHER_FOLDER"  # environment variable, set by run_train.sh


class RunDirectory:
    """``job.dump_folder``, and in it the folder of one attempt: one start of the job, of all its ranks together.

    ``attempt=None`` makes the next free attempt's folder: for rank 0 alone. Other ranks pass the number that rank 0 got
    and make nothing. Only rank 0 calls the methods that write.
    """

    def __init__(
        self,
        dump_folder: str | os.PathLike[str],
        attempt: int | None = None,
        wall_clock: Callable[[], float] = time.time,
        failures: WriteFailures | None = None,
    ) -> None:
        self.folder = Path(dump_folder)
        self._wall_clock = wall_clock
        self._failures = WriteFailures() if failures is None else failures
        self._events = AppendOnlyFile(self.folder / "events.jsonl")
        if attempt is None:
            attempt = self._make_attempt()
            _end_last_line(self.folder / "events.jsonl")
        self.attempt = attempt
        self.attempt_folder = self.folder / "attempts" / str(attempt)

    def log_file(self, rank: int) -> Path:
        """Where a rank's log lines go."""
        return self.attempt_folder / "logs" / f"rank{rank}.log"

    def write_config(self, toml_text: str) -> None:
        """The resolved configuration, for this attempt and as the newest one at the top."""
        self.attempt_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.attempt_folder / "config.toml", toml_text)
        write_atomically(self.folder / "config.toml", toml_text)

    def capture_environment(self) -> threading.Thread:
        """Write ``attempts/<n>/environment/`` from a thread: git and a slow disk must not delay the first step.

        The thread is joined when Python exits. A file that cannot be written is noted; another fault in it is a warning,
        never the run's end.
        """
        folder = self.attempt_folder / "environment"

        def capture() -> None:
            try:
                with self._failures.noted(folder):
                    write_environment(folder)
            except Exception as error:
                logger.warning(f"The environment could not be recorded in {self.attempt_folder}: {error!r}")

        thread = threading.Thread(target=capture, name="environment")
        thread.start()
        return thread

    def event(self, kind: str, **fields: object) -> None:
        """Append one line to events.jsonl: ``{"event": kind, "time": seconds, "attempt": n, ...}``."""
        line = encode({"event": kind, "time": self._wall_clock(), "attempt": self.attempt, **fields})
        with self._failures.noted(self._events.path):
            self._events.append(line)
            self._events.close()

    def remove_exit(self) -> None:
        """At the start of an attempt: an exit.json that is there always tells of the newest attempt."""
        (self.folder / "exit.json").unlink(missing_ok=True)

    def _make_attempt(self) -> int:
        attempts = self.folder / "attempts"
        attempts.mkdir(parents=True, exist_ok=True)
        number = max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal()), default=0) + 1
        while True:
            try:
                (attempts / str(number)).mkdir()
                return number
            except FileExistsError:  # another start of the same job was quicker
                number += 1


def write_exit(dump_folder: str | os.PathLike[str], reason: str, code: int, step: int | None) -> None:
    """exit.json: how the run ended, with the code that launchers return; step: None where it never began."""
    folder = Path(dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / EXIT, _exit_text(reason, code, step))


def tell_launcher(reason: str, code: int, step: int | None) -> None:
    """Write exit.json into the launcher's own temporary folder, for a run whose folder cannot be written.

    Raises StorageError if no launcher has named one (environment variable `LAUNCHER_FOLDER`), or if that is full too.
    """
    folder = os.environ.get(LAUNCHER_FOLDER)
    message = f"The run ended with {reason} (code {code}), and exit.json could not be written anywhere"
    if not folder:
        raise StorageError(message)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / EXIT, _exit_text(reason, code, step))
    except OSError as error:
        raise StorageError(f"{message}: {error}") from error


def _exit_text(reason: str, code: int, step: int | None) -> str:
    return json.dumps({"reason": reason, "code": code, "step": step}) + "\n"


def _end_last_line(path: Path) -> None:
    """A killed writer may leave half a line: end it, so that the next event stands on a line of its own."""
    if path.exists() and path.stat().st_size > 0:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
