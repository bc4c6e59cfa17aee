"""Write the files of a run. A full or failing disk leads to an agreed stop instead of a crash.

`atomic_file` and `write_atomically` replace whole files. Every writer outside of checkpoints
reports a failed write to the `WriteFailures` of its process. The trainer converts that into a
request on which all ranks agree (`Request.WRITE_FAILED`).
"""

from __future__ import annotations

import errno
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

from torchtitan_like.util.exit_codes import ExitCode, RunFailure

logger = logging.getLogger()


class StorageError(RunFailure):
    """A file that the run requires could not be written. All ranks raise it together."""

    exit_code = ExitCode.STORAGE


@contextmanager
def storage_error(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError into a StorageError that names `folder`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The run folder {folder} cannot be written: {describe_os_error(error)} Then start the "
            "run again, or choose another job.dump_folder"
        ) from error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError of a read or write, which has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
        raise


@contextmanager
def atomic_file(
    path: Path, temporary: Path | None = None, *, durable: bool = True
) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends. Readers see the old or the new file.

    It is written as `temporary` in the same folder, by default `<name>.tmp-<process id>`. If the
    block raises, `path` is unchanged and `temporary` is removed; a kill leaves `temporary`.
    durable: the file and its name survive a power failure after the block. Raises OSError.
    """
    temporary = temporary or path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with naming(temporary), open(temporary, "wb") as file:
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

    If the block raises, the staged path is removed. Raises OSError, also if `path` exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield staged
        publish(staged, path)
    finally:
        if staged.is_dir():
            shutil.rmtree(staged)
        staged.unlink(missing_ok=True)


def publish(staged: Path, final: Path) -> None:
    """Rename a complete file or folder to its final name, and wait until the name is on disk.

    The content must be on disk already. Raises OSError, also if `final` exists.
    """
    refuse_existing(final)
    os.rename(staged, final)
    sync_path(final.parent)
    with suppress(PermissionError):  # of a folder in which this user can create nothing
        sync_path(final.parent.parent)  # the folder itself may be new


def refuse_existing(final: Path) -> None:
    """Raise FileExistsError if a file or folder has the name of an output."""
    if os.path.lexists(final):
        raise FileExistsError(
            f"{final} exists already. Expected a new path, because a published file or folder is "
            "never overwritten: choose another name, or move it away"
        )


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WriteFailures:
    """The failed writes of one process. Threads may share it.

    continues: training continues after a failed write (`checkpoint.on_save_error = "continue"`).
    """

    def __init__(self, *, continues: bool = False) -> None:
        self.continues = continues
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def recording(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record an OSError of a write to `path` instead of raising it."""
        try:
            yield
        except OSError as error:
            self.record(path, error)

    def record(self, path: str | os.PathLike[str], error: OSError) -> None:
        """Count a failed write to `path`, and log the first one of each file."""
        with self._lock:
            self._counts[str(path)] += 1
            is_first = self._counts[str(path)] == 1
        if is_first:  # for the log file itself, the line is written to stdout only
            reason = f"{error.strerror or error} (errno {error.errno})"
            logger.error(f"Cannot write {path}: {reason}. {self._consequence()}")

    def stop_is_due(self) -> bool:
        """Return True if a write has failed and the run must therefore stop."""
        return bool(self._counts) and not self.continues

    def summary(self) -> str:
        """Return the number of failed writes of each file; "" without failures."""
        with self._lock:
            return ", ".join(f"{path}: {count}" for path, count in sorted(self._counts.items()))

    def _consequence(self) -> str:
        if self.continues:
            return (
                'Training continues without it (checkpoint.on_save_error = "continue"); further '
                "failures are counted"
            )
        return (
            "All ranks stop with code 74: free space or repair the disk, then start the run again"
        )


class AppendOnlyFile:
    """A file to which whole records are appended. Threads may share it.

    Either all bytes of a record are written, or none. The file is opened at the first append,
    without
    a buffer: appended records need no flush and survive this process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record`. Raises OSError, after removing what was written of the record."""
        with self._lock:
            file = self._open()
            num_written = 0
            try:
                while num_written < len(record):
                    num_written += file.write(memoryview(record)[num_written:])
            except OSError:
                if num_written:
                    with suppress(OSError):  # readers ignore an incomplete last record
                        file.truncate(os.fstat(file.fileno()).st_size - num_written)
                raise

    def sync(self) -> int:
        """Wait until the file is on disk. Return its size in bytes. Raises OSError."""
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


_PERMISSION = ("permission for this user", "Change its owner or mode, or choose another path")
_SPACE = ("free space", "Free some, or choose another disk")
_DISK = ("a disk that works", "Check the disk and its mount")
# Error number -> what was expected, and what to do.
_ADVICE = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: ("a disk that is not mounted read-only", "Choose another path"),
    errno.ENOENT: ("an existing path", "Correct it"),
    errno.ENOTDIR: ("a folder", "Correct the path"),
    errno.EISDIR: ("a file", "Correct the path"),
    errno.EEXIST: ("a new path, or a folder", "Choose another path"),
    errno.ENAMETOOLONG: ("a shorter name", "Choose another path"),
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EMFILE: ("fewer open files", "Raise the limit (ulimit -n)"),
    errno.EFBIG: ("a smaller file", "Choose another path, or raise the limit (ulimit -f)"),
}


def describe_os_error(error: OSError) -> str:
    """Return a message with path, reason, expectation and remedy.

    The message of an error without an error number is its own.
    """
    if error.errno is None:
        return str(error)
    expected, remedy = _ADVICE.get(error.errno, _DISK)
    path = "" if error.filename is None else f"{_as_text(error.filename)}: "
    return f"{path}{error.strerror}. Expected {expected}. {remedy}."


def _as_text(path: str | bytes | int) -> str:
    return path.decode(errors="replace") if isinstance(path, bytes) else str(path)
