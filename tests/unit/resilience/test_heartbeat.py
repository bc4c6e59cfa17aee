"""Heartbeats record positions; a hung rank writes its stacks, and a failing peer kills it."""

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

from torchtitan_like.resilience import heartbeat as heartbeats
from torchtitan_like.resilience.heartbeat import Heartbeat, RankPosition, kill_hung_peers
from torchtitan_like.util.files import WriteFailures


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def read_position(folder: Path) -> dict[str, object]:
    content = dict(json.loads((folder / "heartbeat/rank-3.json").read_text()))
    assert (content.pop("host"), content.pop("pid")) == (socket.gethostname(), os.getpid())
    return content


def test_the_file_has_the_newest_position_and_its_time(tmp_path: Path) -> None:
    clock = Clock()
    position = RankPosition(clock)
    heartbeat = Heartbeat(tmp_path, position, 3, clock)
    heartbeat.check()
    assert read_position(tmp_path) == {
        "phase": "start",
        "step": 0,
        "micro_batch": 0,
        "time": 1000.0,
    }
    clock.now = 1007.5
    position.move("step", 12, 3)
    clock.now = 1100.0
    heartbeat.check()
    assert read_position(tmp_path) == {
        "phase": "step",
        "step": 12,
        "micro_batch": 3,
        "time": 1007.5,
    }
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank-3.json"]


def test_a_hung_rank_writes_the_stacks_of_all_threads_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    position = RankPosition(clock)
    peer_responds = threading.Event()

    def wait_for_a_dead_peer() -> None:
        peer_responds.wait()

    thread = threading.Thread(target=wait_for_a_dead_peer)
    thread.start()
    trace = tmp_path / "comm_traces/rank_3"
    heartbeat = Heartbeat(tmp_path, position, 3, clock, trace=(trace, lambda: b"collectives"))
    stacks = tmp_path / "heartbeat/stacks-rank-3.txt"
    position.stall_seconds = 80.0
    for phase, age, expected in [
        ("step", 79.0, False),
        ("save", 1e4, False),
        ("step", 81.0, True),
        ("step", 200.0, False),
    ]:
        if age != 200.0:  # the position does not change before the last check
            position.move(phase, 7, 1)
        clock.now += age
        stacks.unlink(missing_ok=True)
        trace.unlink(missing_ok=True)
        heartbeat.check()
        assert stacks.exists() == trace.exists() == expected, (phase, age)
        if expected:
            text = stacks.read_text()
            assert "wait_for_a_dead_peer" in text and "test_a_hung_rank" in text
    peer_responds.set()
    thread.join()
    assert caplog.text.count("Step 7, micro-batch 1, has taken 81 s so far") == 1


@pytest.mark.parametrize(
    ("age", "host", "is_own_child", "stall_seconds", "is_killed"),
    [
        (81.0, socket.gethostname(), True, 80.0, True),
        (79.0, socket.gethostname(), True, 80.0, False),
        (1e6, "another-host", True, 80.0, False),
        # another process has reused the process id
        (1e6, socket.gethostname(), False, 80.0, False),
        (1e6, socket.gethostname(), True, float("inf"), False),  # before the first step
    ],
)
def test_a_failing_rank_kills_its_hung_peers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age: float,
    host: str,
    is_own_child: bool,
    stall_seconds: float,
    is_killed: bool,
) -> None:
    clock = Clock()
    Heartbeat(tmp_path, RankPosition(clock), 3, clock).check()
    clock.now += 1e4  # the failing rank has the oldest heartbeat, and is not killed
    monkeypatch.setattr(os, "getppid", lambda: os.getpid() if is_own_child else 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # as under torchrun: ranks 1 to 3 are on this node
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as peer:
        record = {"host": host, "pid": peer.pid, "time": clock.now - age}
        (tmp_path / "heartbeat/rank-1.json").write_text(json.dumps(record))
        (tmp_path / "heartbeat/rank-2.json").write_text("torn")
        kill_hung_peers(tmp_path, stall_seconds, 3, 4, clock)
        assert (peer.wait(timeout=60) == -signal.SIGKILL) if is_killed else peer.poll() is None
        peer.kill()


def test_large_runs_write_heartbeats_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16,384 ranks, each rank writes twice a minute, and immediately when it hangs."""
    clock, write_times = Clock(), []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda *paths: (write_times.append(clock.now), replace(*paths))
    )
    position = RankPosition(clock)
    heartbeat = Heartbeat(tmp_path, position, 3, clock, num_ranks=16384)
    position.stall_seconds = 20.0
    for step in range(120):
        position.move("step", step)
        heartbeat.check()
        clock.now += 1.0
    assert write_times == [1000.0, 1030.0, 1060.0, 1090.0]
    clock.now += 20.0
    heartbeat.check()
    assert (
        read_position(tmp_path)["step"] == 119
        and (tmp_path / "heartbeat/stacks-rank-3.txt").exists()
    )


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, range(8, 16)), ({}, range(16))],
)
def test_only_heartbeats_of_this_node_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranks: range
) -> None:
    """Without torchrun's variables, any rank may be on this node."""
    files, read_text = [], Path.read_text
    (tmp_path / "heartbeat").mkdir()
    for rank in range(100):
        (tmp_path / f"heartbeat/rank-{rank}.json").write_text("torn")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **kwargs: (files.append(path.stem), read_text(path, **kwargs))[1],
    )
    kill_hung_peers(tmp_path, 80.0, 9, 16, Clock())
    assert files == [f"rank-{rank}" for rank in ranks]


def test_a_failed_write_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "heartbeat").write_text("not a folder")
    failures = WriteFailures()
    heartbeat = Heartbeat(tmp_path, RankPosition(), 3, failures=failures)
    heartbeat.check()
    heartbeat.check()
    assert (
        caplog.text.count("Cannot write") == 1 and failures.summary() == f"{tmp_path}/heartbeat: 2"
    )


def test_the_thread_writes_until_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL", 0.01)
    position = RankPosition()
    Heartbeat(tmp_path, position, 3).close()  # the thread was never started
    heartbeat = Heartbeat(tmp_path, position, 3)
    heartbeat.start()
    position.move("step", 1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "heartbeat/rank-3.json").exists() or read_position(tmp_path)["step"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    position.move("save", 1)
    heartbeat.close()
    assert read_position(tmp_path)["phase"] == "save" and not heartbeat._thread.is_alive()
