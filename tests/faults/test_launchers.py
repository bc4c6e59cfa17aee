"""Faults of ranks under run_train.sh and torchrun: what is returned, what is said last, and who starts again by itself."""

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
from tests.faults.kills import Chain
from tests.faults.plants import Plant
from tests.faults.trainer import EXACT, Starter, Torchrun, arguments, exact_rows
from tests.harness.ports import free_ports, listening_addresses
from tests.harness.runner import (
    ROOT,
    kill_session,
    listen_to_signals,
    trainer_command,
    trainer_environment,
)
from torchtitan_like.checkpoint.lock import RunLock
from torchtitan_like.util.run_directory import read_errors


def run_train(folder: Path, plant: Plant) -> subprocess.CompletedProcess[str]:
    """./run_train.sh on two ranks, in which a fault is planted."""
    python = folder.parent / "python"
    python.write_text(f'#!/bin/sh\nexec bash -c \'exec {shlex.quote(sys.executable)} '
                      '"${@/torchtitan_like.train/tests.faults.plants}"\' - "$@"\n')  # fmt: skip
    python.chmod(0o755)
    plants = json.dumps({"plants": [plant], "settings": SHORT})
    variables = {"PYTHON": str(python), "NGPU": "2", "FAULT_PLANTS": plants}
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments(folder, **BASE)], env=trainer_environment({**os.environ, **variables}),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_first_error_is_printed_last(tmp_path: Path) -> None:
    """Its peers die within milliseconds of it, of a connection that it has closed."""
    result = run_train(tmp_path / "outputs", Plant("step", "raise", 1, 4))
    assert result.returncode == 1 and not (tmp_path / "outputs/exit.json").exists()
    first, theirs = sorted(read_errors(tmp_path / "outputs/attempts/1"), key=lambda record: record["time"])
    assert (first["rank"], first["step"], first["phase"], first["host"]) == (1, 4, "step", socket.gethostname())
    assert theirs["rank"] == 0 and "Planted" not in theirs["traceback"]
    torchruns, _, ours = result.stderr.partition("FIRST ERROR of 2")
    assert "rank 1, step 4, phase step:\nTraceback" in ours
    assert ours.splitlines()[-1].endswith("Planted: planted in the step"), result.stderr[-3000:]
    # So it is under torchrun alone, whichever rank it takes for the first.
    cause = torchruns.partition("Root Cause")[2]
    assert "rank 1, step 4, phase step:" in cause and "Planted: planted in the step" in cause, torchruns[-3000:]


def test_a_config_that_one_rank_refuses_is_not_a_crash(tmp_path: Path) -> None:
    """A rank sees what the launcher's check did not: its own GPU, here its number."""
    (tmp_path / "mine.py").write_text("import os\nassert os.environ.get('RANK') != '1', 'not on this rank'\n")
    environ = trainer_environment({**os.environ, "PYTHON": sys.executable, "NGPU": "2", "PYTHONPATH": str(tmp_path)})
    settings = arguments(tmp_path / "outputs", experimental__custom_import="mine", **BASE)
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *settings], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 78, result.stderr[-3000:]
    head, error, problem = result.stderr.splitlines()[-3:]
    assert head.startswith("Nothing was started: a rank rejected the configuration (code 78): ")
    assert "crash" not in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert head.endswith("rank 1, step 0, phase config:") and error.endswith("1 problem in the configuration:")
    assert "experimental.custom_import" in problem and "not on this rank" in problem
    assert json.loads((tmp_path / "outputs/exit.json").read_text())["code"] == 78


SPOILT = """import os
from torchtitan_like.data.batches.training import TrainBatches
from torchtitan_like.data.errors import DataError
plain, steps = TrainBatches.__next__, []
def read(batches):
    steps.append(0)
    if len(steps) == 4 and os.environ["RANK"] == "1":
        raise DataError("the tokens of a streamed source were not written: no space on this node")
    return plain(batches)
TrainBatches.__next__ = read
"""


def test_unreadable_data_on_one_rank_is_not_reported_as_a_lost_peer(tmp_path: Path) -> None:
    """The other ranks see a closed connection. No rank was killed, so the message does not suggest to check memory."""
    (tmp_path / "mine.py").write_text(SPOILT)
    environ = trainer_environment({**os.environ, "PYTHON": sys.executable, "NGPU": "2", "PYTHONPATH": str(tmp_path)})
    result = subprocess.run(
        [str(ROOT / "run_train.sh"), *arguments(tmp_path / "outputs", experimental__custom_import="mine", **BASE)],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 65, result.stderr[-3000:]
    *_, ours = result.stderr.partition("FIRST ERROR of 2")
    assert "rank 1, step 2, phase data:" in ours and ours.splitlines()[-1].endswith("no space on this node"), ours


def test_run_train_returns_the_agreed_code(tmp_path: Path) -> None:
    result = run_train(tmp_path / "outputs", Plant("validation", "SIGTERM", 1, 4))
    assert result.returncode == 75, result.stderr[-3000:]
    assert "requeue (code 75)" in result.stderr.splitlines()[-1]


def test_a_run_listens_on_loopback_only_and_dies_with_its_launcher(tmp_path: Path) -> None:
    """With data workers. The launcher is killed, so it cannot stop its ranks."""
    folder = tmp_path / "outputs"
    settings = arguments(folder, **BASE | {"training__steps": 100_000, "lr_scheduler__total_steps": 100_000},
                         training__dataloader__num_workers=1)  # fmt: skip
    process = subprocess.Popen(
        [str(ROOT / "run_train.sh"), *settings], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=trainer_environment({"PYTHON": sys.executable, "NGPU": "2"}), text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        before = list(takewhile(lambda line: not re.search(r"step: +2 ", line), process.stdout))
        everyone = psutil.Process(process.pid).children(recursive=True)
        [launcher] = [one for one in everyone if one.ppid() == process.pid]
        ranks = [one for one in everyone if one.ppid() == launcher.pid]
        assert len(ranks) == 2 and len(everyone) >= 1 + 2 + 2, "".join(before)
        assert listening_addresses([launcher.pid]) == ["127.0.0.1"], "the one store"
        for rank in ranks:
            assert set(listening_addresses([rank.pid])) == {"127.0.0.1"}, "gloo"
        assert set(listening_addresses(one.pid for one in everyone)) == {"127.0.0.1"}
        launcher.kill()
        _, alive = psutil.wait_procs(everyone, timeout=60)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert not alive, output
    assert process.returncode == 128 + signal.SIGKILL, output[-3000:]


# Holds a rank where it begins to import torch.
HOLDS = """
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
    ("launcher", "to", "signum", "code"),
    [
        ("run_train.sh", "launcher", signal.SIGINT, 130),
        ("run_train.sh", "rank 1", signal.SIGTERM, 75),
        ("torchrun", "launcher", signal.SIGTERM, 1),
        ("none", "rank 0", signal.SIGTERM, 75),
    ],
)
def test_a_signal_during_the_imports_ends_with_its_code(
    tmp_path: Path, launcher: str, to: str, signum: signal.Signals, code: int
) -> None:
    """exit.json is of this start, and not of the one before."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    (folder / "exit.json").write_text('{"reason": "done", "code": 0, "step": 8}')
    (tmp_path / "sitecustomize.py").write_text(HOLDS)
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
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, preexec_fn=listen_to_signals,
    )  # fmt: skip
    try:
        held = [tmp_path / str(rank) for rank in range(num_ranks)]
        give_up = time.monotonic() + 200
        while not all(file.exists() and file.read_text() for file in held):
            assert time.monotonic() < give_up and process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        pid = process.pid if to == "launcher" else int(held[int(to[-1])].read_text())
        os.kill(pid, signum)
        output, _ = process.communicate(timeout=100)
    finally:
        kill_session(process)
    assert process.returncode == code, output
    assert "has crashed" not in output
    expected = {signal.SIGTERM: ("requeue", 75), signal.SIGINT: ("interrupted", 130)}[signum]
    written = json.loads((folder / "exit.json").read_text())
    assert (written["reason"], written["code"], written["step"]) == (*expected, None), output
    if launcher != "torchrun":  # whose own traceback it is
        assert "Traceback" not in output


def test_a_second_start_keeps_the_files_of_a_running_run(tmp_path: Path) -> None:
    """The ranks themselves refuse it, as where the launcher did not know of the run. The run that lives is this test."""
    folder = tmp_path / "outputs"
    lock = RunLock(folder / "checkpoint")
    lock.acquire()
    (folder / "exit.json").write_text('{"reason": "done", "code": 0, "step": 8}')  # it is about to end
    try:
        result = subprocess.run(
            trainer_command(arguments(folder, **BASE), 2, folder), cwd=ROOT, env=trainer_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    finally:
        lock.release()
    assert result.returncode == 74, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"belongs to a run that is alive: process {os.getpid()}" in result.stdout
    assert json.loads((folder / "exit.json").read_text())["step"] == 8
    assert not (folder / "attempts").exists() and not (folder / "config.toml").exists()


def test_torchrun_restarts_a_killed_run(chain: Chain, warm: Starter) -> None:
    """All ranks of it, from the newest checkpoint, to the last step."""
    chain.overrides.update(BASE)
    chain.starter = Torchrun(chain.faults.env, "--max-restarts=1")
    ended = chain.run(plants=[Plant("step", "SIGKILL", 1, 6)], settings=SHORT)
    assert (ended.codes, ended.exit) == ([0], {"reason": "done", "code": 0, "step": 8}), ended.tail
    assert len(chain.check_rows("started again")) == 8
    assert ended.says("Checkpoint start: resume") and ended.says("at step 4"), ended.tail
    assert sorted(path.name for path in (chain.folder / "attempts").iterdir()) == ["1", "2"]
    assert [record["rank"] for record in read_errors(chain.folder / "attempts/1")] == [0]
    assert not read_errors(chain.folder / "attempts/2")


def test_a_run_continues_with_fewer_and_with_more_machines(chain: Chain) -> None:
    """One of two machines is lost in step 4: the other continues alone, saves when a new one joins in step 6; both finish."""
    chain.overrides.update(BASE, checkpoint__interval=1, experimental__custom_import="tests.faults.pace")
    [port] = free_ports(1)
    together = chain.folder.parent / "together"  # the first of them would else begin alone where the second comes late

    def machine(name: str, hold_at: str) -> subprocess.Popen[bytes]:
        variables = {
            "PYTHON": sys.executable, "NGPU": "1", "NNODES": "1:2", "MAX_RESTARTS": "3", "HOLD_AT": hold_at,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PET_LOCAL_ADDR": "127.0.0.1",
            "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1", "WAIT_FOR": str(together),
        }  # fmt: skip
        with open(chain.folder.parent / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [str(ROOT / "run_train.sh"), *chain.argv()], env=trainer_environment({**os.environ, **variables}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def await_output(name: str, words: str) -> None:
        log, give_up = chain.folder.parent / f"{name}.log", time.monotonic() + 240
        while words not in log.read_text():
            assert time.monotonic() < give_up, f"{name} does not say {words!r}:\n{log.read_text()[-6000:]}"
            time.sleep(0.1)

    machines = [machine("stays", "0 6")]
    try:
        give_up = time.monotonic() + 240
        while socket.socket().connect_ex(("127.0.0.1", port)):  # the machine that is lost is not where they meet
            assert time.monotonic() < give_up
            time.sleep(0.1)
        machines.append(machine("is lost", "4"))
        await_output("is lost", "Waiting to begin")  # as it does with the other one
        together.touch()
        await_output("is lost", "Holding at step 4")
        kill_session(machines[1])
        await_output("stays", "Holding at step 6")
        machines.append(machine("is new", ""))
        codes = [each.wait(timeout=240) for each in (machines[0], machines[2])]
    finally:
        for each in machines:
            kill_session(each)
    said = (chain.folder.parent / "stays.log").read_text()
    assert codes == [0, 0], said[-6000:]
    assert re.findall(r"mesh with .*, \[(.*)\]", said) == ["2", "1", "2"]
    rows = exact_rows(chain.folder)
    digests, losses = EXACT.index("data_digest_chain"), EXACT.index("loss")
    expected = chain.reference[: len(rows)]
    assert [(row[0], row[digests]) for row in rows] == [(row[0], row[digests]) for row in expected] and len(rows) == 8
    for row, other in zip(rows, expected, strict=True):
        assert float.fromhex(row[losses]) == pytest.approx(float.fromhex(other[losses]), rel=1e-6)
