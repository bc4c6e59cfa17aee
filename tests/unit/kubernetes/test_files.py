"""`titan k8s init`: the files agree with each other, with the exit codes and with `titan`.

tests/integration/test_kubernetes.py validates them with the schemas of Kubernetes and SkyPilot, and
runs the pods.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchtitan_like.cli import COMMANDS, USAGE_ERROR, executable_commands, main, parse
from torchtitan_like.cli.k8s.init import EXAMPLE
from torchtitan_like.config import JobConfig
from torchtitan_like.util.exit_codes import WORTH_A_RETRY, ExitCode

FILES = ["job.yaml", "sky.yaml", "volume.yaml"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the example in the help: run1 on 4 nodes of 8 GPUs."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(EXAMPLE)[1:]) == 0
    return tmp_path / "k8s"


@pytest.fixture
def objects(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the objects of job.yaml by kind."""
    documents = yaml.safe_load_all((folder / "job.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture
def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Job"]["spec"]["template"]["spec"]
    return spec


def variables(pod: dict[str, Any]) -> dict[str, str]:
    [container] = pod["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_all_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(EXAMPLE)[1:]) == 0
    assert capsys.readouterr().out.split() == [f"k8s/{name}" for name in FILES]
    folder = tmp_path / "k8s"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert not [path for path in folder.iterdir() if "@" in path.read_text()]


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").unlink()
    assert main(["k8s", "init", str(folder), "--image", "other"]) == 2
    assert f"{folder} already contains sky.yaml, volume.yaml" in capsys.readouterr().err
    assert not (folder / "job.yaml").exists()


@pytest.mark.parametrize("name", ["Run1", "1run", "run-", "run_1", "", "a" * 51])
def test_names_that_kubernetes_refuses_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["k8s", "init", str(tmp_path / "k8s"), "--image", "i", "--name", name]) == 2
    assert f"The name is {name!r}. Expected" in capsys.readouterr().err
    assert not (tmp_path / "k8s").exists()


def test_every_pod_finds_pod_0(objects: dict[str, dict[str, Any]], pod: dict[str, Any]) -> None:
    """Kubernetes names pods JOB-INDEX.SUBDOMAIN, and labels them with the name of the job."""
    job, service, policy = (objects[kind] for kind in ("Job", "Service", "NetworkPolicy"))
    name = job["metadata"]["name"]
    assert (name, pod["subdomain"]) == ("run1", service["metadata"]["name"])
    assert variables(pod)["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert variables(pod)["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_the_number_of_nodes_is_the_same_everywhere(
    objects: dict[str, dict[str, Any]], pod: dict[str, Any]
) -> None:
    job = objects["Job"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == int(variables(pod)["NNODES"]) == 4
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(variables(pod)["NGPU"]) == 8


def test_the_policy_agrees_with_the_exit_codes(
    objects: dict[str, dict[str, Any]], pod: dict[str, Any]
) -> None:
    """A code of the run is either for a person, or counts, or is ignored."""
    job = objects["Job"]["spec"]
    fail, ignore, disruption = job["podFailurePolicy"]["rules"]
    for rule in (fail, ignore):
        assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
        assert rule["onExitCodes"]["operator"] == "In"
    final = {int(code) for code in ExitCode} - {*WORTH_A_RETRY, ExitCode.DONE}
    assert fail["action"] == "FailJob"
    assert set(fail["onExitCodes"]["values"]) == final | {USAGE_ERROR}
    assert ignore["action"] == "Ignore"
    assert ignore["onExitCodes"]["values"] == [ExitCode.REQUEUE]
    assert disruption == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert job["backoffLimitPerIndex"] > 0 and job["maxFailedIndexes"] == 0
    assert pod["restartPolicy"] == "Never"  # Kubernetes allows no other one with the policy


def test_the_last_checkpoint_fits_into_the_grace_period(pod: dict[str, Any]) -> None:
    assert pod["terminationGracePeriodSeconds"] > JobConfig().resilience.grace_seconds


def test_shared_memory_is_larger_than_the_default(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    paths = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert volumes[paths["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[paths["/runs"]]


def test_pods_start_a_command_that_exists(folder: Path, pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    program, *words = container["command"]
    assert program == "titan"
    [command] = [one for one in executable_commands(COMMANDS) if one.name == " ".join(words)]
    arguments = parse(command, container["args"])
    assert arguments.config == "llama3_8b.toml"
    assert arguments.settings == ["--job.dump_folder", "/runs/run1"]
    claim = yaml.safe_load((folder / "volume.yaml").read_text())
    assert claim["metadata"]["name"] == pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_task_of_skypilot_starts_torchrun_on_each_node(folder: Path) -> None:
    task = yaml.safe_load((folder / "sky.yaml").read_text())
    assert (task["name"], task["num_nodes"]) == ("run1", 4)
    assert task["resources"]["accelerators"] == "H100:8"
    recovery = task["resources"]["job_recovery"]
    assert set(recovery["recover_on_exit_codes"]) <= set(WORTH_A_RETRY)
    fake = folder / "bin/titan"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$NNODES $NODE_RANK $NGPU $MASTER_ADDR $*"\n')
    fake.chmod(0o755)
    env = {
        "PATH": f"{fake.parent}:/usr/bin:/bin",
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9\n10.0.0.4",
        **task["envs"],
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True)
    expected = "4 2 8 10.0.0.7 train llama3_8b.toml --job.dump_folder /runs/run1\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
