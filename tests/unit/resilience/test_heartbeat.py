"""A rank's place is in its file soon after it came there; one that stands still leaves its stacks, once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchtitan_like.resilience import heartbeat
from torchtitan_like.resilience.heartbeat import Heartbeat
from torchtitan_like.util.files import WriteFailures


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def place(folder: Path) -> dict[str, object]:
    found = dict(json.loads((folder / "heartbeat/rank-3.json").read_text()))
    assert (found.pop("host"), found.pop("pid")) == (socket.gethostname(), os.getpid())
    return found


def test_the_file_tells_the_newest_place_and_when_it_was_reached(tmp_path: Path) -> None:
    clock = Clock()
    one = Heartbeat(tmp_path, 3, clock)
    one.look()
    assert place(tmp_path) == {"phase": "start", "step": 0, "micro_batch": 0, "time": 1000.0}
    clock.now = 1007.5
    one.beat("step", 12, 3)
    clock.now = 1100.0
    one.look()
    assert place(tmp_path) == {"phase": "step", "step": 12, "micro_batch": 3, "time": 1007.5}
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank-3.json"]


def test_who_stands_still_in_a_step_leaves_the_stacks_of_all_threads_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, here = Clock(), threading.Event()

    def waits_for_a_peer_that_is_gone() -> None:
        here.wait()

    other = threading.Thread(target=waits_for_a_peer_that_is_gone)
    other.start()
    trace = tmp_path / "comm_traces/rank_3"
    one = Heartbeat(tmp_path, 3, clock, trace=(trace, lambda: b"collectives"))
    stacks = tmp_path / "heartbeat/stacks-rank-3.txt"
    one.limit = 80.0
    for phase, age, expected in [
        ("step", 79.0, False),
        ("save", 1e4, False),
        ("step", 81.0, True),
        ("step", 200.0, False),
    ]:
        one.beat(phase, 7, 1) if age != 200.0 else None  # the last look finds it where the one before did
        clock.now += age
        stacks.unlink(missing_ok=True)
        trace.unlink(missing_ok=True)
        one.look()
        assert stacks.exists() == trace.exists() == expected, (phase, age)
        if expected:
            told = stacks.read_text()
            assert "waits_for_a_peer_that_is_gone" in told and "test_who_stands_still" in told
    here.set()
    other.join()
    assert caplog.text.count("Step 7, micro-batch 1, has taken 81 s so far") == 1


@pytest.mark.parametrize(
    ("age", "host", "parent", "limit", "is_killed"),
    [
        (81.0, socket.gethostname(), os.getpid(), 80.0, True),
        (79.0, socket.gethostname(), os.getpid(), 80.0, False),
        (1e6, "elsewhere", os.getpid(), 80.0, False),
        (1e6, socket.gethostname(), 0, 80.0, False),  # its number is another process's by now
        (1e6, socket.gethostname(), os.getpid(), float("inf"), False),  # before the first step
    ],
)
def test_a_rank_that_fails_kills_those_that_stand_still_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age: float,
    host: str,
    parent: int,
    limit: float | None,
    is_killed: bool,
) -> None:
    clock = Clock()
    one = Heartbeat(tmp_path, 3, clock)
    one.limit = limit
    one.look()
    clock.now += 1e4  # it has waited for longer than all of them, and ends by itself
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # as torchrun says it: ranks 1 to 3 are here
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as peer:
        record = {"host": host, "pid": peer.pid, "time": clock.now - age}
        (tmp_path / "heartbeat/rank-1.json").write_text(json.dumps(record))
        (tmp_path / "heartbeat/rank-2.json").write_text("torn")
        one.kill_stuck_peers()
        assert (peer.wait(timeout=60) == -signal.SIGKILL) if is_killed else peer.poll() is None
        peer.kill()


def test_thousands_of_ranks_leave_a_shared_file_system_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a second on 16,384 ranks: each writes where it is twice a minute, and at once when it stands still."""
    clock, written = Clock(), []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (written.append(clock.now), replace(*paths)))
    one = Heartbeat(tmp_path, 3, clock, num_ranks=16384)
    one.limit = 20.0
    for step in range(120):
        one.beat("step", step)
        one.look()
        clock.now += 1.0
    assert written == [1000.0, 1030.0, 1060.0, 1090.0]
    clock.now += 20.0
    one.look()
    assert place(tmp_path)["step"] == 119 and (tmp_path / "heartbeat/stacks-rank-3.txt").exists()


@pytest.mark.parametrize(
    ("told", "ranks"), [({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, range(8, 16)), ({}, range(16))]
)
def test_peers_are_found_without_looking_at_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], ranks: range
) -> None:
    """Where the launcher tells which are here: without that, as under srun alone, any of them may be."""
    one, looked_at, read_text = Heartbeat(tmp_path, 9, Clock(), num_ranks=16), [], Path.read_text
    one.limit = 80.0
    (tmp_path / "heartbeat").mkdir()
    for rank in range(100):
        (tmp_path / f"heartbeat/rank-{rank}.json").write_text("torn")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        Path, "read_text", lambda path, **kwargs: (looked_at.append(path.stem), read_text(path, **kwargs))[1]
    )
    one.kill_stuck_peers()
    assert looked_at == [f"rank-{rank}" for rank in ranks]


def test_a_failed_write_is_noted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "heartbeat").write_text("in the way")
    failures = WriteFailures()
    one = Heartbeat(tmp_path, 3, failures=failures)
    one.look()
    one.look()
    assert caplog.text.count("Cannot write") == 1 and failures.summary() == f"{tmp_path}/heartbeat: 2"


def test_the_thread_writes_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    one = Heartbeat(tmp_path, 3)
    one.close()  # of a run that never began
    one = Heartbeat(tmp_path, 3)
    one.start(60)
    one.beat("step", 1)
    give_up = time.monotonic() + 60
    while not (tmp_path / "heartbeat/rank-3.json").exists() or place(tmp_path)["step"] != 1:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    one.beat("save", 1)
    one.close()
    assert place(tmp_path)["phase"] == "save" and not one._thread.is_alive()
