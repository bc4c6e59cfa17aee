"""Exits of processes: exit codes after signals, and no active threads that could abort the exit."""

import json
import signal
import subprocess
import sys

import pytest

from tests.harness.runner import ROOT, listen_to_signals, trainer_command, trainer_environment
from tests.integration.test_resume import arguments
from tests.integration.test_resume import text as text  # a fixture

REASONS = {75: "requeue", 130: "interrupted"}
# Torch starts two threads with this name for each gloo group.
PROGRAM = """
import pathlib, sys
from torchtitan_like.run import main

main(sys.argv[1:])
names = [task.read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
# A single write, because two ranks share the pipe.
sys.stdout.write(f"gloo threads: {names.count('pt_gloo_runloop')}\\n")
"""


@pytest.mark.nightly
def test_host_groups_are_destroyed_before_the_process_ends(text, tmp_path):
    """A gloo thread that frees tensors after the end of Python would abort a complete run.

    The group of the mesh remains in DTensor's caches. It is idle since the last step.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torchtitan_like.torchrun", "--nproc_per_node=2"]
    result = subprocess.run(
        [*launcher, str(tmp_path / "program.py"),
         *arguments(text, tmp_path / "outputs", **{"training.steps": 2})],
        cwd=ROOT, env=trainer_environment(), capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line for line in result.stdout.splitlines() if "gloo threads" in line] == [
        "gloo threads: 2"
    ] * 2


WAITING_MODULE = """
import time
from torchtitan_like.monitor.metrics import Metrics

def wait(*args, **kwargs):
    print("Waiting in the start", flush=True)
    time.sleep(100)

Metrics.__init__ = wait
"""


@pytest.mark.parametrize(
    ("ngpu", "signum", "code"),
    [
        (1, signal.SIGINT, 130),
        pytest.param(1, signal.SIGTERM, 75, marks=pytest.mark.nightly),
        pytest.param(2, signal.SIGTERM, 75, marks=pytest.mark.nightly),
    ],
)
def test_signal_during_startup_gives_the_code_of_the_signal(text, tmp_path, ngpu, signum, code):
    """There is no progress to save, so no rank waits for an agreement."""
    folder = tmp_path / "outputs"
    (tmp_path / "waits.py").write_text(WAITING_MODULE)
    settings = {"training.steps": 100_000, "experimental.custom_import": "waits"}
    process = subprocess.Popen(
        trainer_command(arguments(text, folder, **settings), ngpu, folder),
        cwd=ROOT, env=trainer_environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=listen_to_signals,
    )  # fmt: skip
    assert process.stdout is not None
    output = ""
    while "Waiting in the start" not in output:  # from any rank
        line = process.stdout.readline()
        assert line, output
        output += line
    process.send_signal(signum)
    output += process.communicate(timeout=200)[0]
    assert json.loads((folder / "exit.json").read_text()) == {
        "reason": REASONS[code],
        "code": code,
        "step": None,
    }, output
    # torchrun returns the signal that it received; `titan train` returns the code in exit.json.
    assert process.returncode == (code if ngpu == 1 else 128 + signum), output
    assert "before the first step" in output
    assert not list(folder.glob("checkpoint/step-*"))
