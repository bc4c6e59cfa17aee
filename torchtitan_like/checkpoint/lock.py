"""Lock files: one writer of a folder or file at a time, identified by host, process and heartbeat."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.util.files import write_atomically

logger = logging.getLogger()

LOCK = "run.lock"
Holder = dict[str, Any]


class LockedError(CheckpointError):
    """Another process that is alive holds the lock."""


class FileLock:
    """A lock file, held from `acquire` to `release`; a thread keeps its heartbeat fresh.

    The file identifies its holder. A dead holder on this machine is replaced at once. A holder on
    another machine, or one the file does not identify, is replaced when the heartbeat has not
    changed for `patience` seconds of this process's own waiting, whatever the two clocks say.
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
        """For error messages: `subject` is what is locked, `holder` who locks it, `remedy` what to do."""
        self.path = path
        self.interval = interval
        self.patience = patience
        self._subject, self._holder, self._remedy = subject, holder, remedy
        self._sleep = sleep
        self._me: Holder = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "token": uuid.uuid4().hex,
            "beat": 0,
        }
        self._watched: str | None = None  # text of a holder that may be dead
        self._waited = 0.0  # seconds without a change of that text
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, waiting out a holder that may be dead. Raises LockedError for a live one."""
        while not self.try_acquire():
            pass

    def try_acquire(self) -> bool:
        """Take the lock, or wait `interval / 4` seconds for a holder that may be dead.

        False: call it again. Several ranks can wait together, as no call takes long. Raises
        LockedError, naming the holder, when another process that is alive holds the lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            self._thread = threading.Thread(target=self._keep_fresh, name="file-lock", daemon=True)
            self._thread.start()
            return True
        text = self._read()
        if text is None:
            return False  # its holder has just released it
        holder = _parse(text)
        if holder.get("machine") == self._me["machine"]:
            if _is_alive(holder):
                raise LockedError(self._refusal(holder))
            logger.info(f"{self.path}: {_name(holder)} is dead, the lock is taken over")
            self._remove(text)
        else:
            self._watch(text, holder)
        return False

    def _watch(self, text: str, holder: Holder) -> None:
        """Wait for a heartbeat of a process that cannot be seen from here; remove a silent lock."""
        if self._watched is None:
            logger.info(
                f"{self.path} is held by {_name(holder)}: waiting {self.patience:.0f} s for a sign of life"
            )
            self._watched = text
        elif text != self._watched:
            raise LockedError(self._refusal(holder))
        self._sleep(self.interval / 4)
        self._waited += self.interval / 4
        if self._waited >= self.patience and self._read() == text:
            logger.warning(
                f"{self.path}: no sign of life from {_name(holder)}, the lock is taken over"
            )
            self._remove(text)

    def holder_here(self) -> str | None:
        """Return the message of a LockedError if a live process of this machine holds the lock. Does not wait."""
        try:
            holder = _parse(self._read() or "")
        except OSError:
            return None
        is_here = holder.get("machine") == self._me["machine"]
        return self._refusal(holder) if is_here and _is_alive(holder) else None

    def check(self) -> None:
        """Raise CheckpointError unless the lock is still ours; called before anything is published."""
        for _ in range(5):
            text = self._read()
            if text is not None:
                break
            time.sleep(0.05)  # another run may have it in hand, and find that it is held
        holder = _parse(text) if text is not None else {}
        if holder.get("token") != self._me["token"]:
            now = f"{_name(holder)} holds it now" if holder else "it is gone"
            raise CheckpointError(
                f"{self.path} was taken from this {self._holder} ({_name(self._me)}): {now}. Nothing "
                "more is written, so that the files of two writers do not mix. Find out why this "
                "process was silent for so long, or who removed the file"
            )

    def release(self) -> None:
        """Give the lock up, if it is still ours."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            text = self._read()
            if text is not None and _parse(text).get("token") == self._me["token"]:
                self.path.unlink(missing_ok=True)
        except OSError as error:  # how the run has ended is known by now, and must be told
            logger.warning(f"{self.path} could not be removed: {error}")

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(self._content(), file)
            file.flush()
            os.fsync(file.fileno())
        return True

    def _content(self) -> Holder:
        return {**self._me, "time": time.strftime("%Y-%m-%d %H:%M:%S")}

    def _read(self) -> str | None:
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def _remove(self, text: str) -> None:
        """Remove the lock with this text. One that somebody else has put there meanwhile stays, or is put back."""
        aside = self.path.with_name(f"{self.path.name}.{self._me['token']}")
        if self._read() != text:
            return
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return  # another run was faster
        if aside.read_text(errors="replace") != text:
            os.rename(aside, self.path)
        else:
            aside.unlink()

    def _keep_fresh(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.{self._me['token']}")
        while not self._released.wait(self.interval):
            try:
                text = self._read()
                if text is None:
                    continue
                if _parse(text).get("token") != self._me["token"]:
                    return  # lost: `check` will say so, and the new holder's file is not ours to touch
                self._me["beat"] += 1
                write_atomically(self.path, json.dumps(self._content()), aside, durable=False)
            except OSError as error:
                logger.warning(f"{self.path} could not be refreshed: {error}")

    def _refusal(self, holder: Holder) -> str:
        return f"{self._subject} belongs to a {self._holder} that is alive: {_name(holder)}. {self._remedy}"


class RunLock(FileLock):
    """`run.lock`: the one run that may write into a checkpoint folder."""

    def __init__(self, folder: Path, **waiting: Any) -> None:
        """`waiting`: interval, patience and sleep of `FileLock`."""
        remedy = (
            "Stop that one first, or choose another job.dump_folder, with one of these steps as "
            "checkpoint.initial_load_path if need be"
        )
        super().__init__(folder / LOCK, subject=str(folder), holder="run", remedy=remedy, **waiting)


def _parse(text: str) -> Holder:
    """The holder that a lock file names; empty when it is torn, still being written, or malformed."""
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(holder, dict):
        return {}
    pid = holder.get("pid")
    is_process = type(pid) is int and 0 < pid < 2**31  # kill(0) and kill(-1) address many processes
    texts = [holder.get(key) for key in ("host", "machine", "token")]
    is_valid = is_process and all(isinstance(part, str) for part in texts)
    return holder if is_valid and isinstance(holder.get("started"), str | None) else {}


def _name(holder: Holder) -> str:
    if not holder:
        return "a process that the file does not name"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder['pid']} on {holder['host']}{job}, last seen {holder.get('time', 'just now')}"


def _machine() -> str:
    """What makes pids comparable: the same boot of the same machine, seen from the same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks, by which a reused pid is known; None without /proc."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _is_alive(holder: Holder) -> bool:
    pid = holder["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    fields = _stat(pid)
    if fields is None:
        return True
    return fields[0] not in "ZX" and fields[19] == holder.get("started")


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from its third field on: state first, start time twentieth."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
