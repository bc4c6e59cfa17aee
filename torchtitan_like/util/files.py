"""Write the files of a run so that a full or failing disk becomes an agreed stop instead of a crash.

`atomic_file` and `write_atomically` replace whole files. Every writer outside of checkpoints reports
a failed write to the `WriteFailures` of its process. The trainer turns that into a request, on
which all ranks agree like on any other (`Request.WRITE_FAILED`).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger()


class StorageError(Exception):
    """A file without which the run cannot go on could not be written. Agreed on by all ranks."""


@contextmanager
def storage_error(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that names `folder`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The run folder {folder} cannot be written: {error}. Free space, repair the disk or choose another "
            "job.dump_folder, then start the run again"
        ) from error


@contextmanager
def atomic_file(
    path: Path, temporary: Path | None = None, *, durable: bool = True
) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends: readers find the old file or the new.

    It is written as `temporary` in the same folder, by default `<name>.tmp-<process id>`. If the
    block raises, `path` stays as it was and `temporary` is removed; a kill leaves `temporary`.
    durable: the file and its name survive a power cut from then on. Raises OSError.
    """
    temporary = temporary or path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def write_atomically(
    path: Path, content: str | bytes, temporary: Path | None = None, *, durable: bool = True
) -> None:
    """Replace the content of `path` as `atomic_file` does; text is UTF-8."""
    with atomic_file(path, temporary, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def staged_path(path: Path) -> Iterator[Path]:
    """Yield a path next to `path`, for a file or folder that becomes `path` when the block ends.

    If the block raises, what it wrote is removed. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield staged
        os.rename(staged, path)
    finally:
        if staged.is_dir():
            shutil.rmtree(staged)
        staged.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WriteFailures:
    """The failed writes of one process. Threads may share it.

    `goes_on`: training continues without what could not be written (`checkpoint.on_save_error = "continue"`).
    """

    def __init__(self, *, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def noted(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Turn an OSError inside into a note: the caller continues without what it wanted to write to `path`."""
        try:
            yield
        except OSError as error:
            self.note(path, error)

    def note(self, path: str | os.PathLike[str], error: OSError) -> None:
        """Count a failed write to `path`; log the first one of each file."""
        with self._lock:
            self._counts[str(path)] += 1
            is_first = self._counts[str(path)] == 1
        if is_first:  # also of the log file itself: the line still goes to stdout
            logger.error(f"Cannot write {path}: {error.strerror or error} (errno {error.errno}). {self._consequence()}")

    def stop_is_due(self) -> bool:
        """Return True if a write has failed and the run is to stop for it."""
        return bool(self._counts) and not self.goes_on

    def summary(self) -> str:
        """Return the number of failed writes of each file; empty without any."""
        with self._lock:
            return ", ".join(f"{path}: {count}" for path, count in sorted(self._counts.items()))

    def _consequence(self) -> str:
        if self.goes_on:
            return 'Training goes on without it (checkpoint.on_save_error = "continue"); further failures are counted'
        return "All ranks stop with code 74: free space or repair the disk, then start the run again"


class AppendOnlyFile:
    """A file to which whole records are appended: all bytes of a record, or none. Threads may share it.

    It is opened at the first append, without a buffer: what `append` has accepted needs no flush and survives this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record`. Raises OSError, and then nothing of it is left in the file."""
        with self._lock:
            file, written = self._open(), 0
            try:
                while written < len(record):
                    written += file.write(memoryview(record)[written:])
            except OSError:
                if written:
                    with suppress(OSError):  # the reader copes with half a record at the end
                        file.truncate(os.fstat(file.fileno()).st_size - written)
                raise

    def sync(self) -> int:
        """Return the size in bytes once all of it is on the disk. Raises OSError."""
        with self._lock:
            file = self._open()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def close(self) -> None:
        """Close the file; the next append opens it again. Raises OSError."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _open(self) -> FileIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        return self._file
