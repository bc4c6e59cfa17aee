"""The state of a run: running, hung or stopped, and why."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.report.run_folder import Row, step_row, write_rows, write_steady_run
from torchtitan_like.report.files import newest_metrics
from torchtitan_like.report.recorded import read_run
from torchtitan_like.report.state import LOST_SECONDS, RunState, find_state


def append_rows(run: Path, *rows: Row) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_state(run: Path, now: float) -> RunState:
    return find_state(run, newest_metrics(run), now)


def write_heartbeats(run: Path, pids: list[int], *, host: str = "", phase: str = "step") -> None:
    for rank, pid in enumerate(pids):
        beat = {"phase": phase, "step": 21, "micro_batch": 0, "time": 1051.0, "pid": pid}
        beat["host"] = host or socket.gethostname()
        write_rows(run / f"attempts/1/heartbeat/rank-{rank}.json", [beat])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 steps whose newest row, step 20, is of 1050 s. A step takes 2 s."""
    run = write_steady_run(tmp_path / "run")
    (run / "config.toml").write_text("[training]\nsteps = 40\n")
    return run


@pytest.fixture(scope="module")
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_running_run_has_a_position(run: Path) -> None:
    append_rows(run, step_row(21, 1052.0), step_row(22, 1054.0))
    write_heartbeats(run, [os.getpid()], host="elsewhere")
    assert read_state(run, 1055.0) == RunState("running", "", "step at step 21", 1054.0)


def test_a_run_without_progress_hangs_and_later_counts_as_stopped(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    assert read_state(run, 1051.0 + 59).name == "running"
    hung = read_state(run, 1051.0 + 65)
    assert (hung.name, hung.detail) == ("hung", "no progress for 1:05 min, step at step 21")
    lost = read_state(run, 1051.0 + LOST_SECONDS + 1)
    assert lost.label == "stopped: lost" and lost.detail.startswith("no end recorded")


def test_slow_steps_are_not_hung(run: Path) -> None:
    write_rows(run / "metrics.jsonl", [step_row(n, 1000.0 + 100 * n) for n in range(1, 11)])
    assert read_state(run, 2000.0 + 490).name == "running"
    assert read_state(run, 2000.0 + 510).name == "hung"


def test_the_reason_of_an_end(run: Path, ended_pid: int) -> None:
    write_heartbeats(run, [ended_pid])
    (run / "exit.json").write_text('{"reason": "done", "code": 0, "step": 20}')
    state = read_state(run, 1e9)
    assert state.label == "stopped: done" and state.line == "stopped: done (code 0) at step 20"
    (run / "exit.json").write_text("{")
    assert read_state(run, 1e9).name == "unreadable"


def test_a_killed_process_stops_the_run(run: Path, ended_pid: int) -> None:
    write_heartbeats(run, [ended_pid])
    state = read_state(run, 1052.0)
    assert state.label == "stopped: killed"
    assert state.detail == "killed: the processes of rank 0 are gone, without an error"
    write_heartbeats(run, [os.getpid(), ended_pid])
    heartbeat = run / "attempts/1/heartbeat/rank-0.json"
    heartbeat.write_text(heartbeat.read_text().replace("1051.0", "1e11"))  # since this process
    state = read_state(run, 1052.0)
    assert state.name == "hung"
    assert state.detail == "the process of rank 1 is gone, without an error"


def test_the_number_of_a_process_may_belong_to_a_new_one(run: Path) -> None:
    write_heartbeats(run, [os.getpid()])  # of 1051 s, long before this process
    assert read_state(run, 1052.0).name == "stopped"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"phase": "end"}])
def test_processes_of_other_machines_and_ended_ones_are_not_killed(
    run: Path, ended_pid: int, change: dict[str, str]
) -> None:
    write_heartbeats(run, [ended_pid], **change)
    assert read_state(run, 1052.0).name == "running"


def test_the_first_error_and_the_ranks_without_one_are_the_reason(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    error = {"rank": 0, "phase": "step", "step": 21, "time": 1052.0, "host": "a"}
    error["traceback"] = "Traceback\n  File x\nRuntimeError: Connection closed by peer\n"
    for name in ("first", "rank-0"):
        write_rows(run / f"attempts/1/errors/{name}.json", [error])
    expected = (
        "error on rank 0 in phase step at step 21: RuntimeError: Connection closed by peer; "
        "no error of rank 1: killed, or it hung"
    )
    assert read_state(run, 1053.0).detail == expected
    (run / "exit.json").write_text('{"reason": "lost_peer", "code": 69, "step": 21}')
    expected = "lost_peer (code 69) at step 21; no error of rank 1: killed, or it hung"
    assert read_state(run, 1053.0).detail == expected


def test_a_new_attempt_runs_again(run: Path) -> None:
    error = {"rank": 0, "phase": "step", "step": 21, "traceback": "x"}
    write_rows(run / "attempts/1/errors/first.json", [error])
    assert read_state(run, 1053.0).name == "stopped"
    (run / "attempts/2").mkdir()
    assert read_state(run, 1053.0).name == "running"


DAMAGE = [b"", b"\0\xff{[", b"[]\n", b"[7]", b"7", b'{"time": "x"}\n']


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize(
    "name", ["exit.json", "attempts/1/heartbeat/rank-0.json", "attempts/1/errors/first.json"]
)
def test_damaged_files_have_a_state(run: Path, name: str, content: bytes) -> None:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    assert read_state(run, 1053.0).name


def test_a_report_skips_damaged_rows(run: Path) -> None:
    """They make a run unreadable for `titan run ls`."""
    write_heartbeats(run, [1], host="elsewhere")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "loss": \n\xff\n{"step": "x"}\n{"step": 22, "time": "no"}\n{"st')
    state = read_run(run).state
    assert (state.label, state.updated) == ("stopped: lost", 1051.0)
