"""The state of a run: running, hung or stopped, and why."""

from __future__ import annotations

import html
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.report.run_folder import Row, step_row, write_rows, write_steady_run
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.cli import main
from torchtitan_like.config import load_config
from torchtitan_like.launcher.outcome import Start, report_end
from torchtitan_like.report.history import build_history
from torchtitan_like.report.recorded import read_run
from torchtitan_like.report.runs import list_runs
from torchtitan_like.report.state import LOST_SECONDS, RunState, find_state
from torchtitan_like.report.summary import summarize
from torchtitan_like.report.watch import Status
from torchtitan_like.slurm import job as slurm_job
from torchtitan_like.slurm.watchdog import observe_run
from torchtitan_like.util.run_directory import RunEnd, write_exit


def append_rows(run: Path, *rows: Row) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


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
    assert find_state(run, 1055.0) == RunState("running", "", "step at step 21", 1054.0)


def test_a_run_without_progress_hangs_and_later_counts_as_stopped(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    assert find_state(run, 1051.0 + 59).name == "running"
    hung = find_state(run, 1051.0 + 65)
    assert (hung.name, hung.detail) == ("hung", "no progress for 1:05 min, step at step 21")
    lost = find_state(run, 1051.0 + LOST_SECONDS + 1)
    assert lost.label == "stopped: lost" and lost.line.startswith(
        "stopped: lost: no sign for an hour"
    )


def test_slow_steps_are_not_hung(run: Path) -> None:
    write_rows(run / "metrics.jsonl", [step_row(n, 1000.0 + 100 * n) for n in range(1, 11)])
    state = find_state(run, 2000.0 + 490)
    assert (state.name, state.silent_after) == ("running", 500.0)
    assert find_state(run, 2000.0 + 510).name == "hung"


def test_a_killed_process_stops_the_run(run: Path, ended_pid: int) -> None:
    write_heartbeats(run, [ended_pid])
    state = find_state(run, 1052.0)
    assert state.label == "stopped: killed"
    assert state.detail == "killed: the processes of rank 0 are gone, without an error"
    write_heartbeats(run, [os.getpid(), ended_pid])
    heartbeat = run / "attempts/1/heartbeat/rank-0.json"
    heartbeat.write_text(heartbeat.read_text().replace("1051.0", "1e11"))  # since this process
    state = find_state(run, 1052.0)
    assert state.name == "hung"
    assert state.detail == "the process of rank 1 is gone, without an error"


def test_the_number_of_a_process_may_belong_to_a_new_one(run: Path) -> None:
    write_heartbeats(run, [os.getpid()])  # of 1051 s, long before this process
    assert find_state(run, 1052.0).name == "stopped"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"phase": "end"}])
def test_processes_of_other_machines_and_ended_ones_are_not_killed(
    run: Path, ended_pid: int, change: dict[str, str]
) -> None:
    write_heartbeats(run, [ended_pid], **change)
    assert find_state(run, 1052.0).name == "running"


def test_the_first_error_and_the_ranks_without_one_are_the_reason(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    error = {"rank": 0, "phase": "step", "step": 21, "time": 1052.0, "host": "a"}
    error["traceback"] = "Traceback\n  File x\nRuntimeError: Connection closed by peer\n"
    for name in ("first", "rank-0"):
        write_rows(run / f"attempts/1/errors/{name}.json", [error])
    expected = (
        "error on rank 0 in phase step at step 21: RuntimeError: Connection closed by peer; "
        "no error of rank 1: killed (out of memory? see dmesg), or it hung"
    )
    assert find_state(run, 1053.0).detail == expected
    (run / "exit.json").write_text('{"reason": "lost_peer", "code": 69, "step": 21}')
    expected = "lost_peer (code 69) at step 21; no error of rank 1: killed (out of memory? see dmesg), or it hung"
    assert find_state(run, 1053.0).detail == expected


def test_a_new_attempt_runs_again(run: Path) -> None:
    error = {"rank": 0, "phase": "step", "step": 21, "traceback": "x"}
    write_rows(run / "attempts/1/errors/first.json", [error])
    assert find_state(run, 1053.0).name == "stopped"
    (run / "attempts/2").mkdir()
    assert find_state(run, 1053.0).name == "running"


# ---- one word in every view

NOW = 1055.0
JOB_CONFIG = """
[job]
dump_folder = "%s"
[training]
steps = 40
[checkpoint]
enable = false
folder = "checkpoint"
[resilience]
kill_switch_path = "KILL"
"""


def _write_error(run: Path) -> None:
    write_heartbeats(run, [1], host="elsewhere")
    error = {"rank": 0, "phase": "step", "step": 21, "time": 1052.0, "host": "a", "gpu": None}
    error["traceback"] = "Traceback\n  File x\nValueError: the cause\n"
    for name in ("first", "rank-0"):
        write_rows(run / f"attempts/1/errors/{name}.json", [error])


def _write_only_exit(run: Path) -> None:
    shutil.rmtree(run)
    write_exit(run, RunEnd("bad_config", 78, None))


def _start_again(run: Path) -> None:
    """The newest row is older than an hour, and the new ranks have no heartbeat yet."""
    write_rows(run / "metrics.jsonl", [step_row(1, NOW - 4000.0)])
    (run / "attempts/2").mkdir(parents=True)
    os.utime(run / "attempts/2", (NOW, NOW))


def _append_damage(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "loss": \n\xff\n{"step": "x"}\n{"step": 22, "time": "no"}\n{"st')


# Content of a run directory, and its state. `run` is of 5 s ago.
VIEWS: dict[str, tuple[Callable[[Path, int], object], str]] = {
    "running": (lambda run, _: write_heartbeats(run, [1], host="elsewhere"), "running"),
    "started": (lambda run, _: (run / "attempts/1").mkdir(parents=True), "running"),
    "started again": (lambda run, _: _start_again(run), "running"),
    "hung": (
        lambda run, _: write_rows(run / "metrics.jsonl", [step_row(1, NOW - 70.0)]),
        "hung",
    ),
    "lost": (
        lambda run, _: write_rows(run / "metrics.jsonl", [step_row(1, NOW - 4000.0)]),
        "stopped: lost",
    ),
    "crashed": (lambda run, _: _write_error(run), "stopped: error"),
    "killed": (lambda run, ended_pid: write_heartbeats(run, [ended_pid]), "stopped: killed"),
    "a rank killed": (
        lambda run, _: (_write_error(run), write_exit(run, RunEnd("lost_peer", 69, 21))),
        "stopped: lost_peer",
    ),
    "preempted": (lambda run, _: write_exit(run, RunEnd("requeue", 75, 20)), "stopped: requeue"),
    "a full disk": (lambda run, _: write_exit(run, RunEnd("storage", 74, 20)), "stopped: storage"),
    "Ctrl-C": (
        lambda run, _: write_exit(run, RunEnd("interrupted", 130, 20)),
        "stopped: interrupted",
    ),
    "titan run stop": (
        lambda run, _: ((run / "KILL").touch(), write_exit(run, RunEnd("interrupted", 130, 20))),
        "stopped: interrupted",
    ),
    "damaged data": (
        lambda run, _: write_exit(run, RunEnd("bad_data", 65, 20)),
        "stopped: bad_data",
    ),
    "completed": (lambda run, _: write_exit(run, RunEnd("done", 0, 20)), "stopped: done"),
    "never started": (lambda run, _: _write_only_exit(run), "stopped: bad_config"),
    "damaged rows": (lambda run, _: _append_damage(run), "running"),
    "damaged config": (lambda run, _: (run / "config.toml").write_text("["), "running"),
    "damaged end": (lambda run, _: (run / "exit.json").write_text("{"), "unreadable"),
}


@pytest.mark.parametrize("case", VIEWS)
def test_every_view_shows_the_same_state(
    case: str,
    run: Path,
    ended_pid: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, label = VIEWS[case]
    write(run, ended_pid)
    monkeypatch.setattr(time, "time", lambda: NOW)
    name, _, reason = label.partition(": ")
    state = find_state(run, NOW)
    assert (state.label, state.line.startswith(label)) == (label, True)
    (summary,) = list_runs(run.parent, NOW)
    assert f" {label} " in summary.format_row(NOW)
    status = Status.read(run, NOW)
    assert name == "running" or state.line in "\n".join(status.lines())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(status.view())
    assert console.export_text().splitlines()[0].rstrip() == f"run  {label}"
    numbers = summarize(build_history(read_run(run)))
    assert (numbers["state"], numbers["state_reason"]) == (name, reason)
    assert main(["run", "report", str(run), "-o", str(run.parent / "page.html")]) == 0
    assert html.escape(state.line) in (run.parent / "page.html").read_text()
    assert f"run {run}: {state.line}; " in observe_run(run, 30, NOW).message + "; "
    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB_CONFIG % run))
    capsys.readouterr()
    slurm_job.main(["after", "0", "1"])
    assert f"The run is {state.line}" in capsys.readouterr().err
    if name == "stopped" and reason not in ("lost", "killed"):  # ends that a launcher reports
        (run / "checkpoint/step-20").mkdir(parents=True)
        write_manifest(run / "checkpoint/step-20", {"kind": "full", "step": 20, "files": {}})
        config = load_config(["--job.dump_folder", str(run), "--checkpoint.enable"])
        code = 1 if state.end is None else state.end.code
        report_end(config, code, None, Start(0.0, 1, "titan train", ["titan"]))
        last_words = capsys.readouterr()
        assert reason == "done" or label in last_words.err, last_words
        continues = case in ("a rank killed", "preempted", "a full disk", "Ctrl-C")
        assert ("Resume at step 20 (the same command)" in last_words.err) == continues
        assert (state.advice == "The same command continues the run.") == continues
        assert ("--clear" in state.advice) == (case == "titan run stop")
        assert (state.tone == "paused") == (continues or case == "titan run stop")


DAMAGE = [b"", b"\0\xff{[", b"[]\n", b"[7]", b"7", b'{"time": "x"}\n']


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize(
    "name", ["exit.json", "attempts/1/heartbeat/rank-0.json", "attempts/1/errors/first.json"]
)
def test_damaged_files_have_a_state(run: Path, name: str, content: bytes) -> None:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    assert find_state(run, 1053.0).name
