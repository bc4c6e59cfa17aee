"""Locks that admit one writer of a folder or file.

`FileLock` and `run_lock` are for work that no other process waits for: a second run or command is
refused, with the name of the first. They work on any file system, by a heartbeat. If the holder
dies, a process of its machine takes over at once, and one of another machine after a wait.

`file_lock` (flock) is for short work, and for builds for which other processes wait. The kernel
releases it when the holder ends. It cannot replace `FileLock`: many clusters have no flock between
nodes, a process that the holder has forked keeps it, and a refused process cannot name the holder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.run_directory import LOCK

logger = logging.getLogger()

POLL_SECONDS = 1.0

Holder = dict[str, Any]


class LockedError(RunFailure):
    """Another process that is alive holds the lock."""

    exit_code = ExitCode.STORAGE


class LockLostError(RunFailure):
    """Another process has taken the lock, or a user has removed it."""

    exit_code = ExitCode.STORAGE


class FileLock:
    """A lock file with a heartbeat, held from `acquire` to `release`.

    The file identifies its holder. If the holder was a process of this machine that has died, the
    lock is taken over at once. Otherwise, it is taken over if the heartbeat does not change for
    `patience` seconds. The waiting process measures them, so clocks may differ between hosts.
    """

    def __init__(
        self,
        path: Path,
        *,
        subject: str,
        holder: str,
        remedy: str,
        interval: float = 10.0,
        patience: float = 35.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create the lock without acquiring it. The strings are parts of error messages.

        subject: the locked folder or file. holder: a noun for the writer, such as `run`.
        remedy: what to do if another process holds the lock.
        """
        self.path = path
        self.interval = interval
        self.patience = patience
        self._subject = subject
        self._holder = holder
        self._remedy = remedy
        self._sleep = sleep
        self._content: Holder = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _start_ticks(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "token": uuid.uuid4().hex,
            "beat": 0,
        }
        self._watched: str | None = None  # text of a lock file whose holder may be dead
        self._waited = 0.0  # seconds without a change of that text
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock. Waits if the holder may be dead; raises LockedError if it is alive."""
        while not self.try_acquire():
            pass

    def try_acquire(self) -> bool:
        """Take the lock, or wait `interval / 4` seconds for a holder that may be dead.

        Returns False if the caller must call it again. Each call is short, so that all ranks can
        wait together. Raises LockedError if a process that is alive holds the lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            self._thread = threading.Thread(target=self._refresh, name="file-lock", daemon=True)
            self._thread.start()
            return True
        text = self._read()
        if text is None:
            return False  # the holder has just released the lock
        holder = _parse(text)
        if holder.get("machine") == self._content["machine"]:
            if _is_alive(holder):
                raise LockedError(self._refusal(holder))
            logger.info(f"{self.path}: {_describe(holder)} is dead, taking over the lock")
            self._remove(text)
        else:
            self._watch(text, holder)
        return False

    def _watch(self, text: str, holder: Holder) -> None:
        """Wait for a heartbeat from another machine, and remove the lock if none comes."""
        if self._watched is None:
            logger.info(
                f"{self.path} is held by {_describe(holder)}: waiting {self.patience:.0f} s for a "
                "heartbeat"
            )
            self._watched = text
        elif text != self._watched:
            raise LockedError(self._refusal(holder))
        self._sleep(self.interval / 4)
        self._waited += self.interval / 4
        if self._waited >= self.patience and self._read() == text:
            logger.warning(
                f"{self.path}: no heartbeat from {_describe(holder)} in {self.patience:.0f} s, "
                "taking over the lock"
            )
            self._remove(text)

    def local_holder(self) -> str | None:
        """Return a LockedError's message if a live process of this machine holds the lock.

        Does not block.
        """
        try:
            holder = _parse(self._read() or "")
        except OSError:
            return None
        is_local = holder.get("machine") == self._content["machine"]
        return self._refusal(holder) if is_local and _is_alive(holder) else None

    def check(self) -> None:
        """Raise LockLostError if this process has lost the lock. Call it before publishing."""
        for _ in range(5):
            text = self._read()
            if text is not None:
                break
            time.sleep(0.05)  # another process may have renamed the file to inspect it
        holder = _parse(text) if text is not None else {}
        if holder.get("token") != self._content["token"]:
            state = f"{_describe(holder)} holds it now" if holder else "it is gone"
            raise LockLostError(
                f"{self.path} was taken from this {self._holder} ({_describe(self._content)}): "
                f"{state}. Expected to hold the lock. Writing has stopped, so that two writers do "
                "not mix their files. Check why this process was stalled, or who removed the file"
            )

    def release(self) -> None:
        """Release the lock if this process still holds it."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            text = self._read()
            if text is not None and _parse(text).get("token") == self._content["token"]:
                self.path.unlink(missing_ok=True)
        except OSError as error:  # must not hide the outcome of the run
            logger.warning(f"{self.path} could not be removed: {error}")

    def _create(self) -> bool:
        try:
            file = self.path.open("x")
        except FileExistsError:
            return False
        with file:
            json.dump(self._dated_content(), file)
            file.flush()
            os.fsync(file.fileno())
        return True

    def _dated_content(self) -> Holder:
        return {**self._content, "time": time.strftime("%Y-%m-%d %H:%M:%S")}

    def _read(self) -> str | None:
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def _remove(self, text: str) -> None:
        """Remove the lock file if it has this text. Keeps or restores a newer lock file."""
        temporary = self.path.with_name(f"{self.path.name}.{self._content['token']}")
        if self._read() != text:
            return
        try:
            os.rename(self.path, temporary)
        except FileNotFoundError:
            return  # another process removed it first
        if temporary.read_text(errors="replace") != text:
            os.rename(temporary, self.path)
        else:
            temporary.unlink()

    def _refresh(self) -> None:
        """Update the heartbeat until `release`. Runs in a thread."""
        temporary = self.path.with_name(f"{self.path.name}.{self._content['token']}")
        while not self._released.wait(self.interval):
            try:
                text = self._read()
                if text is None:
                    continue
                if _parse(text).get("token") != self._content["token"]:
                    return  # another process has the lock; `check` raises
                self._content["beat"] += 1
                heartbeat = json.dumps(self._dated_content())
                write_atomically(self.path, heartbeat, temporary, durable=False)
            except OSError as error:
                logger.warning(f"{self.path} could not be refreshed: {error}")

    def _refusal(self, holder: Holder) -> str:
        return (
            f"{self._subject} belongs to a {self._holder} that is alive: {_describe(holder)}. "
            f"{self._remedy}"
        )


def run_lock(folder: Path, **waiting: Any) -> FileLock:
    """Return `run.lock`, the lock of a checkpoint folder. Only its holder may write there.

    waiting: interval, patience, and sleep of `FileLock`.
    """
    remedy = (
        "Stop that run first, or choose another job.dump_folder. To start from one of these "
        "steps there, set checkpoint.initial_load_path"
    )
    return FileLock(folder / LOCK, subject=str(folder), holder="run", remedy=remedy, **waiting)


def _parse(text: str) -> Holder:
    """Return the holder in a lock file's text. Empty if the text is incomplete or malformed."""
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(holder, dict):
        return {}
    pid = holder.get("pid")
    is_process = type(pid) is int and 0 < pid < 2**31  # kill(0) and kill(-1) address many processes
    strings = [holder.get(key) for key in ("host", "machine", "token")]
    is_valid = is_process and all(isinstance(value, str) for value in strings)
    return holder if is_valid and isinstance(holder.get("started"), str | None) else {}


def _describe(holder: Holder) -> str:
    if not holder:
        return "an unknown process"
    job = f", job {holder['job']}" if holder.get("job") else ""
    time_seen = holder.get("time", "just now")
    return f"process {holder['pid']} on {holder['host']}{job}, last seen {time_seen}"


def _machine() -> str:
    """Return an identifier of this boot and PID namespace, within which PIDs are comparable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_ticks(pid: int) -> str | None:
    """Return when a process started, in kernel ticks. Detects a reused PID. None without /proc."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _is_alive(holder: Holder) -> bool:
    started = _start_ticks(holder["pid"])
    return is_running(holder["pid"]) and started in (None, holder.get("started"))


def is_running(pid: int) -> bool:
    """Return True if a process of this machine exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    fields = _stat(pid)
    return fields is None or fields[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third, with the state first."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


# ---- flock


class LockWaitStopped(Exception):
    """The wait for a lock was stopped by another thread."""


@contextmanager
def file_lock(
    stream: IO[Any] | int,
    *,
    wait: bool = True,
    stop: threading.Event | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold an exclusive lock on an open file, or on the folder of a file descriptor.

    wait: False raises BlockingIOError if another process holds the lock. stop: an event that ends
    the wait with LockWaitStopped. on_wait: called once before waiting. Raises OSError if the file
    system has no locks.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        on_wait()
        _wait(stream, stop)
    except OSError as error:
        reason = f"the file system has no file locks ({error.strerror})"
        raise OSError(error.errno, reason) from error
    try:
        yield
    finally:  # closing is not enough: a process forked since then has the file open too
        fcntl.flock(stream, fcntl.LOCK_UN)


def _wait(stream: IO[Any] | int, stop: threading.Event | None) -> None:
    if stop is None:
        fcntl.flock(stream, fcntl.LOCK_EX)
        return
    while not stop.wait(POLL_SECONDS):
        with suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    raise LockWaitStopped
