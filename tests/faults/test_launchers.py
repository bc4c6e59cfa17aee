"""Faults of ranks under run_train.sh and torchrun: exit codes, last messages and restarts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from tests.faults.drills import BASE, SHORT
from tests.faults.injection import Injection
from tests.faults.kills import Chain
from tests.faults.trainer import EXACT, Starter, Torchrun, arguments, exact_rows
from tests.harness.ports import free_ports, listening_addresses
from tests.harness.runner import (
    ROOT,
    kill_session,
    listen_to_signals,
    trainer_command,
    trainer_environment,
)
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.locks import run_lock
from torchtitan_like.util.run_directory import read_errors


def run_train(folder: Path, injection: Injection) -> subprocess.CompletedProcess[str]:
    """Run ./run_train.sh on two ranks with an injected fault."""
    python = folder.parent / "python"
    python.write_text(f'#!/bin/sh\nexec bash -c \'exec {shlex.quote(sys.executable)} '
                      '"${@/torchtitan_like.train/tests.faults.injection}"\' - "$@"\n')  # fmt: skip
    python.chmod(0o755)
    injections = json.dumps({"injections": [injection], "settings": SHORT})
    variables = {"PYTHON": str(python), "NGPU": "2", "FAULT_INJECTIONS": injections}
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments(folder, **BASE)],
        env=trainer_environment({**os.environ, **variables}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_first_error_is_printed_last(tmp_path: Path) -> None:
    """Its peers crash milliseconds later because of the closed connection."""
    result = run_train(tmp_path / "outputs", Injection("step", "raise", 1, 4))
    assert result.returncode == 1 and not (tmp_path / "outputs/exit.json").exists()
    first, peer_error = sorted(
        read_errors(tmp_path / "outputs/attempts/1"), key=lambda record: record["time"]
    )
    assert (first["rank"], first["step"], first["phase"], first["host"]) == (
        1,
        4,
        "step",
        socket.gethostname(),
    )
    assert peer_error["rank"] == 0 and "InjectedError" not in peer_error["traceback"]
    torchrun_output, _, last_output = result.stderr.partition("FIRST ERROR of 2")
    assert "rank 1, step 4, phase step:\nTraceback" in last_output
    assert last_output.splitlines()[-1].endswith("InjectedError: injected into the step"), (
        result.stderr[-3000:]
    )
    # torchrun also prints this error as the root cause, whichever rank it reports first.
    cause = torchrun_output.partition("Root Cause")[2]
    assert (
        "rank 1, step 4, phase step:" in cause and "InjectedError: injected into the step" in cause
    ), torchrun_output[-3000:]


@pytest.mark.nightly
def test_config_error_on_one_rank_is_not_a_crash(tmp_path: Path) -> None:
    """Only ranks can check some settings, such as their GPU. Here a module rejects one rank."""
    (tmp_path / "user_module.py").write_text(
        "import os\nassert os.environ.get('RANK') != '1', 'not on this rank'\n"
    )
    environ = trainer_environment(
        {**os.environ, "PYTHON": sys.executable, "NGPU": "2", "PYTHONPATH": str(tmp_path)}
    )
    settings = arguments(tmp_path / "outputs", experimental__custom_import="user_module", **BASE)
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *settings],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 78, result.stderr[-3000:]
    head, error, problem = result.stderr.splitlines()[-3:]
    assert head.startswith("Nothing was started: a rank rejected the configuration (code 78): ")
    assert "crash" not in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert head.endswith("rank 1, step 0, phase config:") and error.endswith(
        "1 problem in the configuration:"
    )
    assert "experimental.custom_import" in problem and "not on this rank" in problem
    assert json.loads((tmp_path / "outputs/exit.json").read_text())["code"] == 78


DATA_ERROR_CODE = """import os
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.data_errors import DataError
plain, steps = TrainBatches.__next__, []
def read(batches):
    steps.append(0)
    if len(steps) == 4 and os.environ["RANK"] == "1":
        raise DataError("the tokens of a streamed source were not written: no space on this node")
    return plain(batches)
TrainBatches.__next__ = read
"""


@pytest.mark.nightly
def test_data_error_on_one_rank_is_not_reported_as_a_lost_peer(tmp_path: Path) -> None:
    """The other rank only gets a connection error. The message does not blame missing memory."""
    (tmp_path / "user_module.py").write_text(DATA_ERROR_CODE)
    environ = trainer_environment(
        {**os.environ, "PYTHON": sys.executable, "NGPU": "2", "PYTHONPATH": str(tmp_path)}
    )
    result = subprocess.run(
        [str(ROOT / "run_train.sh"),
         *arguments(tmp_path / "outputs", experimental__custom_import="user_module", **BASE)],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 65, result.stderr[-3000:]
    *_, last_output = result.stderr.partition("FIRST ERROR of 2")
    assert "rank 1, step 2, phase data:" in last_output and last_output.splitlines()[-1].endswith(
        "no space on this node"
    ), last_output


@pytest.mark.nightly
def test_run_train_returns_the_agreed_code(tmp_path: Path) -> None:
    result = run_train(tmp_path / "outputs", Injection("validation", "SIGTERM", 1, 4))
    assert result.returncode == 75, result.stderr[-3000:]
    assert "requeue (code 75)" in result.stderr.splitlines()[-1]


def test_run_listens_only_on_loopback_and_ends_with_its_launcher(tmp_path: Path) -> None:
    """The run has data workers. The launcher is killed, so it cannot stop its ranks."""
    folder = tmp_path / "outputs"
    settings = arguments(
        folder,
        **BASE | {"training__steps": 100_000, "lr_scheduler__total_steps": 100_000},
        training__dataloader__num_workers=1,
    )
    process = subprocess.Popen(
        [str(ROOT / "run_train.sh"), *settings], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=trainer_environment({"PYTHON": sys.executable, "NGPU": "2"}),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        before = list(takewhile(lambda line: not re.search(r"step: +2 ", line), process.stdout))
        processes = psutil.Process(process.pid).children(recursive=True)
        [launcher] = [descendant for descendant in processes if descendant.ppid() == process.pid]
        ranks = [descendant for descendant in processes if descendant.ppid() == launcher.pid]
        assert len(ranks) == 2 and len(processes) >= 1 + 2 + 2, "".join(before)
        assert listening_addresses([launcher.pid]) == ["127.0.0.1"], "the rendezvous store"
        for rank in ranks:
            assert set(listening_addresses([rank.pid])) == {"127.0.0.1"}, "gloo"
        assert set(listening_addresses(descendant.pid for descendant in processes)) == {"127.0.0.1"}
        launcher.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert not alive, output
    assert process.returncode == ExitCode.LOST_PEER, output[-3000:]


# Halts a rank at its import of torch.
HALT_CODE = """
import os, sys, time
from pathlib import Path

class Hold:
    def find_spec(self, name, *_):
        is_rank = "RANK" in os.environ or "torch.distributed.run" not in " ".join(sys.orig_argv[:3])
        if name == "torch" and is_rank and "torchtitan_like.torchrun" not in sys.orig_argv[:3]:
            Path(os.environ["HELD"], os.environ.get("RANK", "0")).write_text(str(os.getpid()))
            time.sleep(200)

sys.meta_path.insert(0, Hold())
"""


@pytest.mark.parametrize(
    ("launcher", "target", "signum", "code"),
    [
        pytest.param("run_train.sh", "launcher", signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param("run_train.sh", "rank 1", signal.SIGTERM, 75, marks=pytest.mark.nightly),
        pytest.param("torchrun", "launcher", signal.SIGTERM, 1, marks=pytest.mark.nightly),
        ("none", "rank 0", signal.SIGTERM, 75),
    ],
)
def test_signal_during_imports_gives_the_code_of_the_signal(
    tmp_path: Path, launcher: str, target: str, signum: signal.Signals, code: int
) -> None:
    """exit.json belongs to this start and not to the previous one."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    (folder / "exit.json").write_text('{"reason": "done", "code": 0, "step": 8}')
    (tmp_path / "sitecustomize.py").write_text(HALT_CODE)
    train = ["-m", "torchtitan_like.train", *arguments(folder, **BASE)]
    command = {
        "run_train.sh": [str(ROOT / "run_train.sh"), *train[2:]],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *train],
        "none": [sys.executable, *train],
    }[launcher]
    num_ranks = 1 if launcher == "none" else 2
    variables = {"PYTHON": sys.executable, "NGPU": "2", "HELD": str(tmp_path)}
    environ = trainer_environment(variables)
    environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environ['PYTHONPATH']}"
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=listen_to_signals,
    )  # fmt: skip
    try:
        pid_files = [tmp_path / str(rank) for rank in range(num_ranks)]
        deadline = time.monotonic() + 200
        while not all(file.exists() and file.read_text() for file in pid_files):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        pid = process.pid if target == "launcher" else int(pid_files[int(target[-1])].read_text())
        os.kill(pid, signum)
        output, _ = process.communicate(timeout=100)
    finally:
        kill_session(process)
    assert process.returncode == code, output
    assert "stopped: killed" not in output
    expected = {signal.SIGTERM: ("requeue", 75), signal.SIGINT: ("interrupted", 130)}[signum]
    written = json.loads((folder / "exit.json").read_text())
    assert (written["reason"], written["code"], written["step"]) == (*expected, None), output
    if launcher != "torchrun":  # torchrun prints its own traceback
        assert "Traceback" not in output


@pytest.mark.nightly
def test_second_start_does_not_change_the_files_of_a_running_run(tmp_path: Path) -> None:
    """The ranks reject the start if the launcher did not detect the running run.

    The test process acts as the running run.
    """
    folder = tmp_path / "outputs"
    lock = run_lock(folder / "checkpoint")
    lock.acquire()
    # The running run is about to end.
    (folder / "exit.json").write_text('{"reason": "done", "code": 0, "step": 8}')
    try:
        result = subprocess.run(
            trainer_command(arguments(folder, **BASE), 2, folder), cwd=ROOT,
            env=trainer_environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    finally:
        lock.release()
    assert result.returncode == 74, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"belongs to a run that is alive: process {os.getpid()}" in result.stdout
    assert json.loads((folder / "exit.json").read_text())["step"] == 8
    assert not (folder / "attempts").exists() and not (folder / "config.toml").exists()


@pytest.mark.nightly
def test_torchrun_restarts_a_killed_run(chain: Chain, fork_server: Starter) -> None:
    """All ranks resume from the newest checkpoint and finish."""
    chain.overrides.update(BASE)
    chain.starter = Torchrun(chain.faults.env, "--max-restarts=1")
    run = chain.run(injections=[Injection("step", "SIGKILL", 1, 6)], settings=SHORT)
    assert (run.codes, run.exit) == ([0], {"reason": "done", "code": 0, "step": 8}), run.tail
    assert len(chain.check_rows("after the restart")) == 8
    assert run.has_output("Checkpoint start: resume") and run.has_output("at step 4"), run.tail
    assert sorted(path.name for path in (chain.folder / "attempts").iterdir()) == ["1", "2"]
    assert [record["rank"] for record in read_errors(chain.folder / "attempts/1")] == [0]
    assert not read_errors(chain.folder / "attempts/2")


@pytest.mark.nightly
def test_elastic_run_continues_on_fewer_and_on_more_nodes(chain: Chain) -> None:
    """One of two nodes is lost in step 4, and the other node continues.

    In step 6 a new node joins, so the first one saves a checkpoint. Both finish.
    """
    chain.overrides.update(
        BASE, checkpoint__interval=1, experimental__custom_import="tests.faults.pace"
    )
    [port] = free_ports(1)
    # Nodes wait for this file: otherwise the first node would start without the second one.
    start_file = chain.folder.parent / "start"

    def start_node(name: str, hold_at: str) -> subprocess.Popen[bytes]:
        variables = {
            "PYTHON": sys.executable, "NGPU": "1", "NNODES": "1:2", "MAX_RESTARTS": "3",
            "HOLD_AT": hold_at,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PET_LOCAL_ADDR": "127.0.0.1",
            "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1",
            "WAIT_FOR": str(start_file),
        }  # fmt: skip
        with open(chain.folder.parent / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [str(ROOT / "run_train.sh"), *chain.argv()],
                env=trainer_environment({**os.environ, **variables}), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def await_output(name: str, words: str) -> None:
        log, deadline = chain.folder.parent / f"{name}.log", time.monotonic() + 240
        while words not in log.read_text():
            assert time.monotonic() < deadline, (
                f"the log of {name} lacks {words!r}:\n{log.read_text()[-6000:]}"
            )
            time.sleep(0.1)

    nodes = [start_node("first-node", "0 6")]
    try:
        deadline = time.monotonic() + 240
        # The first node must host the rendezvous, because the second one is lost.
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        nodes.append(start_node("lost-node", "4"))
        await_output("lost-node", "Waiting to start")  # both nodes wait
        start_file.touch()
        await_output("lost-node", "Holding at step 4")
        kill_session(nodes[1])
        await_output("first-node", "Holding at step 6")
        nodes.append(start_node("new-node", ""))
        codes = [node.wait(timeout=240) for node in (nodes[0], nodes[2])]
    finally:
        for node in nodes:
            kill_session(node)
    output = (chain.folder.parent / "first-node.log").read_text()
    assert codes == [0, 0], output[-6000:]
    assert re.findall(r"mesh with .*, \[(.*)\]", output) == ["2", "1", "2"]
    rows = exact_rows(chain.folder)
    digests, losses = EXACT.index("data_digest_chain"), EXACT.index("loss")
    expected = chain.reference[: len(rows)]
    assert [(row[0], row[digests]) for row in rows] == [
        (row[0], row[digests]) for row in expected
    ] and len(rows) == 8
    for row, other in zip(rows, expected, strict=True):
        assert float.fromhex(row[losses]) == pytest.approx(float.fromhex(other[losses]), rel=1e-6)
