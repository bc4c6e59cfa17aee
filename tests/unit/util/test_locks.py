"""The lock admits one writer per folder, replaces dead holders, and detects its own loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.util.locks import FileLock, LockedError, LockLostError, run_lock
from torchtitan_like.util.run_directory import LOCK

HOLDER_PROGRAM = """
import sys, time
from pathlib import Path
from torchtitan_like.util.locks import run_lock
run_lock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


def never(seconds: float) -> None:
    raise AssertionError("an unexpected wait")


def write_remote_lock(folder: Path, **changes: Any) -> Path:
    """Write the lock of a process on another machine."""
    holder = {
        "host": "node-7",
        "machine": "another",
        "pid": 1,
        "started": "5",
        "job": "812",
        "token": "remote",
        "beat": 3,
    }
    (folder / LOCK).write_text(json.dumps(holder | changes))
    return folder / LOCK


def is_held(lock: FileLock) -> bool:
    try:
        lock.check()
    except LockLostError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lock_is_held_until_released(tmp_path: Path) -> None:
    lock = run_lock(tmp_path / "new", sleep=never)
    lock.acquire()
    lock.check()
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []
    assert not is_held(lock)


def test_a_second_run_is_refused_with_the_name_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first = run_lock(tmp_path, sleep=never)
    first.acquire()
    with pytest.raises(
        LockedError, match=rf"alive: process {os.getpid()} on \S+, job 4711, last seen 20"
    ):
        run_lock(tmp_path, sleep=never).acquire()
    assert is_held(first)
    first.release()
    second = run_lock(tmp_path, sleep=never)
    second.acquire()
    second.release()


def test_a_live_local_holder_is_detected_without_waiting(tmp_path: Path) -> None:
    first, second = run_lock(tmp_path, sleep=never), run_lock(tmp_path, sleep=never)
    assert second.local_holder() is None
    first.acquire()
    message = second.local_holder()
    assert (
        message is not None and f"belongs to a run that is alive: process {os.getpid()}" in message
    )
    first.release()
    write_remote_lock(tmp_path)
    assert second.local_holder() is None, "the state of a remote process is unknown"


def test_the_lock_of_a_killed_local_process_is_taken_over_immediately(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER_PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"process {process.pid} on"):
        run_lock(tmp_path, sleep=never).acquire()
    process.kill()
    lock = run_lock(tmp_path, sleep=never)
    wait_until(lambda: "Z" in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2])
    lock.acquire()  # the process is a zombie: its parent has not waited for it
    assert is_held(lock)
    lock.release()
    process.wait()
    process.stdout.close()


def test_a_reused_pid_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = run_lock(tmp_path, sleep=never)
    write_remote_lock(tmp_path, machine=lock._content["machine"], pid=os.getpid(), started="1")
    lock.acquire()
    assert is_held(lock)
    lock.release()


def test_the_lock_of_a_silent_remote_process_is_taken_over_after_a_wait(
    tmp_path: Path, caplog: Any
) -> None:
    write_remote_lock(tmp_path)
    waits: list[float] = []
    lock = run_lock(tmp_path, interval=10, patience=35, sleep=waits.append)
    lock.acquire()
    assert 35 <= sum(waits) < 40
    assert is_held(lock)
    assert "process 1 on node-7, job 812" in caplog.text and "no heartbeat from" in caplog.text
    lock.release()


def test_the_lock_of_a_remote_process_with_a_heartbeat_is_respected(tmp_path: Path) -> None:
    write_remote_lock(tmp_path)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if sum(waits) > 30:
            write_remote_lock(tmp_path, beat=4)

    with pytest.raises(LockedError, match="belongs to a run that is alive: process 1 on node-7"):
        run_lock(tmp_path, interval=10, patience=35, sleep=sleep).acquire()
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "remote"


def test_the_lock_of_a_remote_process_that_ends_is_taken_over(tmp_path: Path) -> None:
    file = write_remote_lock(tmp_path)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        file.unlink()

    lock = run_lock(tmp_path, sleep=sleep)
    lock.acquire()
    assert is_held(lock) and len(waits) == 1
    lock.release()


def test_an_empty_lock_is_taken_over_after_a_wait(tmp_path: Path) -> None:
    """Its holder may be writing it, or may have died while writing."""
    (tmp_path / LOCK).touch()
    waits: list[float] = []
    lock = run_lock(tmp_path, sleep=waits.append)
    lock.acquire()
    assert sum(waits) >= 35 and is_held(lock)
    lock.release()


@pytest.mark.parametrize(
    "holder",
    [
        {"pid": None},
        {"pid": "12"},
        {"pid": True},
        {"pid": -1},
        {"pid": 0},
        {"pid": 10**30},
        {"started": 7},
        {"host": None},
    ],
    ids=str,
)
def test_a_malformed_local_lock_is_taken_over_after_a_wait(
    tmp_path: Path, holder: dict[str, Any]
) -> None:
    """A process with such an id is not alive, although signal 0 to pid 0 or -1 always succeeds."""
    waits: list[float] = []
    lock = run_lock(tmp_path, sleep=waits.append)
    write_remote_lock(tmp_path, machine=lock._content["machine"], **holder)
    lock.acquire()
    assert sum(waits) >= 35 and is_held(lock)
    lock.release()


@pytest.mark.parametrize(
    "content", [b"", b'{"host": "node-7", "pi', bytes(range(256)), b"[" * 10**5]
)
def test_the_wait_for_an_unreadable_lock_is_split_into_short_calls(
    tmp_path: Path, content: bytes
) -> None:
    """Other ranks wait for each call, so every call must be shorter than their timeout."""
    (tmp_path / LOCK).write_bytes(content)
    waits: list[float] = []
    lock = run_lock(tmp_path, sleep=waits.append)
    longest = 0.0
    while not lock.try_acquire():
        longest = max(longest, sum(waits))
        waits.clear()
    assert longest == 2.5 and is_held(lock)
    lock.release()


def test_only_one_of_several_waiting_processes_gets_the_lock(tmp_path: Path) -> None:
    write_remote_lock(tmp_path)
    locks = [run_lock(tmp_path, interval=0.04, patience=0.1) for _ in range(4)]
    outcomes: list[str] = []

    def acquire(lock: FileLock) -> None:
        try:
            lock.acquire()
            outcomes.append("held")
        except LockedError as error:
            assert "belongs to a run that is alive" in str(error)
            outcomes.append("refused")

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Several may hold it for a moment; `check` runs before each publish and admits only one.
    assert "held" in outcomes
    assert [is_held(lock) for lock in locks].count(True) == 1
    for lock in locks:
        lock.release()


def test_the_heartbeat_changes_the_file_until_the_release(tmp_path: Path) -> None:
    lock = run_lock(tmp_path, interval=0.01)
    lock.acquire()
    wait_until(lambda: json.loads((tmp_path / LOCK).read_text())["beat"] >= 3)
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lost_lock_is_detected_and_left_to_its_new_holder(tmp_path: Path) -> None:
    lock = run_lock(tmp_path, interval=0.01)
    lock.acquire()
    other = write_remote_lock(tmp_path)
    thread = lock._thread
    assert thread is not None
    thread.join(60)  # the heartbeat thread stops, and must not overwrite the new holder's lock
    with pytest.raises(
        LockLostError, match="was taken from this run .*: process 1 on node-7, job 812"
    ):
        lock.check()
    lock.release()
    assert json.loads(other.read_text())["token"] == "remote"


def test_a_removed_lock_is_detected(tmp_path: Path) -> None:
    lock = run_lock(tmp_path)
    lock.acquire()
    (tmp_path / LOCK).unlink()
    with pytest.raises(LockLostError, match="it is gone"):
        lock.check()
    lock.release()


def test_a_lock_that_cannot_be_removed_causes_only_a_warning(tmp_path: Path, caplog: Any) -> None:
    lock = run_lock(tmp_path)
    lock.acquire()
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).mkdir()  # reading it is an OSError
    lock.release()
    assert "could not be removed" in caplog.text
