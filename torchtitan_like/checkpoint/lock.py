"""`run.lock`: one writer in a checkpoint folder, known by name, host and heartbeat."""

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

logger = logging.getLogger()

LOCK = "run.lock"
Holder = dict[str, Any]


class RunLock:
    """Held from `acquire` to `release` by the one run that may write into `folder`; a thread keeps it fresh.

    The file tells who holds it. A holder that died on this machine is succeeded at once. Of one elsewhere only the
    heartbeat is known: it is succeeded when that has not changed for `patience` seconds of our own waiting, whatever
    the clocks of the two machines say.
    """

    def __init__(
        self,
        folder: Path,
        *,
        interval: float = 10.0,
        patience: float = 35.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.path = folder / LOCK
        self.interval = interval
        self.patience = patience
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
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, waiting out a holder that may be dead. Raises CheckpointError naming one that is not."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            text = self._read()
            if text is None:
                continue  # it has just been released
            holder = _parse(text)
            if holder.get("machine") == self._me["machine"]:
                if _is_alive(holder):
                    raise CheckpointError(self._refusal(holder))
                logger.info(f"{self.path}: {_name(holder)} is dead, the lock is taken over")
            else:
                self._wait_out(text, holder)
            self._remove(text)
        self._thread = threading.Thread(target=self._keep_fresh, name="run-lock", daemon=True)
        self._thread.start()

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
                f"{self.path} was taken from this run ({_name(self._me)}): {now}. Nothing more is written, so that two "
                "runs do not mix their checkpoints; see why this process was silent for so long, or who removed the file"
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

    def _wait_out(self, text: str, holder: Holder) -> None:
        """Wait for a heartbeat of a holder whose process cannot be seen from here; raises when there is one."""
        logger.info(f"{self.path} is held by {_name(holder)}: waiting {self.patience:.0f} s for a sign of life")
        waited = 0.0
        while waited < self.patience:
            self._sleep(self.interval / 4)
            waited += self.interval / 4
            now = self._read()
            if now is not None and now != text:
                raise CheckpointError(self._refusal(_parse(now)))
            if now is None:
                return
        logger.warning(f"{self.path}: no sign of life from {_name(holder)}, the lock is taken over")

    def _remove(self, text: str) -> None:
        """Remove the lock with this text. One that somebody else has put there meanwhile stays, or is put back."""
        aside = self.path.with_name(f"{LOCK}.{self._me['token']}")
        if self._read() != text:
            return
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return  # another run was faster
        if aside.read_text() != text:
            os.rename(aside, self.path)
        else:
            aside.unlink()

    def _keep_fresh(self) -> None:
        aside = self.path.with_name(f"{LOCK}.{self._me['token']}")
        while not self._released.wait(self.interval):
            try:
                text = self._read()
                if text is None:
                    continue
                if _parse(text).get("token") != self._me["token"]:
                    return  # lost: `check` will say so, and the new holder's file is not ours to touch
                self._me["beat"] += 1
                aside.write_text(json.dumps(self._content()))
                os.replace(aside, self.path)
            except OSError as error:
                logger.warning(f"{self.path} could not be refreshed: {error}")

    def _refusal(self, holder: Holder) -> str:
        return (
            f"{self.path.parent} belongs to a run that is alive: {_name(holder)}. Stop that one first, or choose another "
            "job.dump_folder, with one of these steps as checkpoint.initial_load_path if need be"
        )


def _parse(text: str) -> Holder:
    """What a lock file says; empty when it says nothing, as one that is just being written."""
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _name(holder: Holder) -> str:
    if not holder:
        return "a run that has not given its name"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')}{job}, last seen {holder.get('time', 'just now')}"


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
    return fields[0] not in "ZX" and fields[19] == holder["started"]


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from its third field on: state first, start time twentieth."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
