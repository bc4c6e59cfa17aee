"""The files of docs/examples/kubernetes are valid, and their pods train through losses of pods.

No cluster is involved: a loop applies the job's rules to processes on this machine, and packages of
Kubernetes and SkyPilot check the files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.parity import short_documents
from tests.harness.ports import free_ports
from tests.harness.runner import EXACT, ROOT, kill_session, trainer_environment
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

pytestmark = pytest.mark.nightly

PACKAGES = ("kubernetes-validate==1.37.0", "skypilot==0.14.1")
VERSIONS = ("1.29", "1.31", "1.37")  # of Kubernetes: the oldest with all fields, stable, newest
LOAD_TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.name, task.num_nodes, *task.volumes)
"""
POLL_S = 0.1
NUM_PODS = 2  # instead of those in the file
FILES = ROOT / "docs/examples/kubernetes"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the packages that know the formats."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin/pip", "install", "--quiet", *PACKAGES]
    subprocess.run(install, check=True)
    return folder / "bin"


def test_kubernetes_accepts_the_files(tools: Path) -> None:
    for version in VERSIONS:
        validate = [tools / "kubernetes-validate", "--strict", "-k", version]
        command = [*validate, FILES / "job.yaml", FILES / "volume.yaml"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_skypilot_accepts_the_task(tools: Path, tmp_path: Path) -> None:
    command = [tools / "python", "-c", LOAD_TASK, FILES / "sky.yaml"]
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "run1 4 /runs"


class IndexedJob:
    """Runs the pods of a job as processes, and replaces them as its podFailurePolicy says.

    codes: the exit codes of the pods of each index, in order. programs: a folder with `python` and
    `titan`.
    """

    def __init__(self, job: dict[str, Any], run: Path, settings: list[str], programs: Path) -> None:
        self.spec = job["spec"]
        self.metrics = run / "metrics.jsonl"
        self.logs = run.with_name(f"{run.name}.logs")
        self.logs.mkdir()
        [container] = self.spec["template"]["spec"]["containers"]
        self.command = [*container["command"], "debug_model.toml", *settings]
        self.command += ["--job.dump_folder", str(run)]
        interfaces = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # of a cluster
        variables = {
            entry["name"]: entry["value"]
            for entry in container["env"]
            if "value" in entry and entry["name"] not in interfaces
        }
        local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "NGPU": "1"}
        local |= {"POD_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "NNODES": str(NUM_PODS)}
        local["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
        self.env = trainer_environment(variables | local)
        self.pods = {index: self.start(index) for index in range(NUM_PODS)}
        self.codes: dict[int, list[int]] = {index: [] for index in self.pods}

    def start(self, index: int) -> subprocess.Popen[str]:
        with open(self.log_of(index), "a") as log:
            return subprocess.Popen(
                self.command,
                env={**self.env, "NODE_RANK": str(index)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def log_of(self, index: int) -> Path:
        """Return the file with the output of all pods of an index."""
        return self.logs / f"{index}.log"

    def run_to_step(self, step: int) -> None:
        """Replace pods until a row of a step from `step` on is written."""
        self._run_until(
            lambda: self.metrics.exists() and read_rows(self.metrics)[-1]["step"] >= step
        )

    def run_to_end(self) -> None:
        """Replace pods until all have completed."""
        self._run_until(lambda: not self.pods)

    def _run_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not is_reached():
            assert time.monotonic() < deadline, self.describe()
            ended = [index for index, pod in self.pods.items() if pod.poll() is not None]
            for index in ended:
                self._replace(index, self.pods.pop(index).returncode)
            time.sleep(POLL_S)

    def _replace(self, index: int, returncode: int) -> None:
        code = returncode if returncode >= 0 else 128 - returncode
        self.codes[index].append(code)
        if code == 0:
            return
        actions = [
            rule["action"]
            for rule in self.spec["podFailurePolicy"]["rules"]
            if code in rule.get("onExitCodes", {}).get("values", [])
        ]
        assert actions in ([], ["Ignore"]), self.describe()
        self.pods[index] = self.start(index)

    def describe(self) -> str:
        """Return the codes, and the ends of all outputs."""
        logs = [path.read_text()[-3000:] for path in sorted(self.logs.iterdir())]
        return "\n".join([str(self.codes), *logs])

    def kill(self) -> None:
        for pod in self.pods.values():
            kill_session(pod)


def test_a_job_trains_through_losses_of_pods(tmp_path: Path) -> None:
    """One pod is killed, then one gets SIGTERM. The metrics equal those of an uninterrupted job."""
    documents = yaml.safe_load_all((FILES / "job.yaml").read_text())
    job = next(document for document in documents if document["kind"] == "Job")
    settings = [
        "--training.dataset_path", str(short_documents(tmp_path)), "--training.steps", "150",
        "--training.seq_len", "32", "--training.local_batch_size", "2", "--model.args.dim", "32",
        "--model.args.n_layers", "2", "--model.args.n_heads", "4", "--checkpoint.enable",
        "--checkpoint.interval", "10", "--metrics.log_freq", "1", "--validation.no-enable",
    ]  # fmt: skip
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("python", ""), ("titan", "-m torchtitan_like")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        program.chmod(0o755)
    jobs = []
    try:
        jobs.append(whole := IndexedJob(job, tmp_path / "whole", settings, programs))
        whole.run_to_end()
        jobs.append(broken := IndexedJob(job, tmp_path / "broken", settings, programs))
        broken.run_to_step(12)
        kill_session(broken.pods[1])  # replaced before pod 0 notices
        broken.run_to_step(30)
        broken.pods[1].terminate()
        broken.run_to_end()
        late = broken.start(1)  # replaced after the last step
        assert late.wait(timeout=120) == 0
        assert "step 150 of 150 is done already" in broken.log_of(1).read_text()
    finally:
        for started in jobs:
            started.kill()
    assert whole.codes == {0: [0], 1: [0]}
    lost, saved = int(ExitCode.LOST_PEER), int(ExitCode.REQUEUE)
    assert broken.codes == {0: [lost, saved, 0], 1: [128 + signal.SIGKILL, saved, 0]}
    exact = [
        [[row[key] for key in EXACT] for row in read_rows(started.metrics)]
        for started in (whole, broken)
    ]
    assert exact[0] == exact[1] and len(exact[0]) == 150
