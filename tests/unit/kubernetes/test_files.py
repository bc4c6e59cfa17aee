"""The example files agree with each other, with the exit codes and with `titan`.

tests/integration/test_kubernetes.py validates them with the schemas of Kubernetes and SkyPilot, and
runs the pods.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.runner import ROOT
from torchtitan_like.cli import COMMANDS, executable_commands, parse
from torchtitan_like.config import JobConfig
from torchtitan_like.util.exit_codes import WORTH_A_RETRY, WRONG_INPUT, ExitCode

FOLDER = ROOT / "docs/examples/kubernetes"


@pytest.fixture
def objects() -> dict[str, dict[str, Any]]:
    """Return the objects of job.yaml by kind."""
    documents = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture
def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Job"]["spec"]["template"]["spec"]
    return spec


def variables(pod: dict[str, Any]) -> dict[str, str]:
    [container] = pod["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


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
    assert set(fail["onExitCodes"]["values"]) == final | {WRONG_INPUT}
    assert ignore["action"] == "Ignore"
    assert ignore["onExitCodes"]["values"] == [ExitCode.LOST_PEER, ExitCode.REQUEUE]
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


def test_the_volume_is_claimed(pod: dict[str, Any]) -> None:
    claim = yaml.safe_load((FOLDER / "volume.yaml").read_text())
    assert claim["metadata"]["name"] == pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_node_rank_is_the_index_of_the_pod(pod: dict[str, Any]) -> None:
    fields = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
        for entry in pod["containers"][0]["env"]
        if "valueFrom" in entry
    }
    assert fields == {
        "NODE_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "POD_IP": "status.podIP",
    }


def write_titan(folder: Path) -> str:
    """Write a `titan` that prints how it was called, and a `python` that prints $STEP."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "titan").write_text(
        """#!/bin/sh
case "$1" in
  check) echo "config of $*"; exit "${CHECK:-0}" ;;
  *) echo "$NNODES $NODE_RANK $NGPU $MASTER_ADDR $*" ;;
esac
"""
    )
    (programs / "python").write_text(
        """#!/bin/sh
[ "$*" = "-m torchtitan_like.slurm.job before" ] || exit 3
grep -q "config of check llama3_8b.toml" && echo "$STEP"
"""
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    return f"{programs}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("rank", "changes", "code", "output"),
    [
        ("0", {}, 0, "4 0 8 10.0.0.7 train llama3_8b.toml --job.dump_folder /runs/run1"),
        ("2", {}, 0, "4 2 8 run1-0.run1 train llama3_8b.toml --job.dump_folder /runs/run1"),
        ("2", {"STEP": "none"}, 0, ""),
        ("2", {"CHECK": "78"}, 78, ""),
    ],
    ids=["pod 0 listens on its own address", "another pod", "all steps are done", "bad config"],
)
def test_a_pod_starts_training(
    rank: str, changes: dict[str, str], code: int, output: str, pod: dict[str, Any], tmp_path: Path
) -> None:
    container = pod["containers"][0]
    path = write_titan(tmp_path)
    own = {"PATH": path, "NODE_RANK": rank, "POD_IP": "10.0.0.7", "STEP": "10"}
    command = [*container["command"], *container["args"]]
    env = {**variables(pod), **own, **changes}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (code, output), done.stderr


def test_the_command_of_a_pod_exists(pod: dict[str, Any]) -> None:
    for name in ("train", "check"):
        [command] = [one for one in executable_commands(COMMANDS) if one.name == name]
        arguments = parse(command, pod["containers"][0]["args"])
        assert arguments.config == "llama3_8b.toml"
        assert arguments.settings == ["--job.dump_folder", "/runs/run1"]


def test_the_task_of_skypilot_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    assert (task["name"], task["num_nodes"]) == ("run1", 4)
    assert task["resources"]["accelerators"] == "H100:8"
    recovery = task["resources"]["job_recovery"]
    assert set(recovery["recover_on_exit_codes"]) <= set(WORTH_A_RETRY)
    env = {
        "PATH": write_titan(tmp_path),
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9\n10.0.0.4",
        **task["envs"],
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True)
    expected = "4 2 8 10.0.0.7 train llama3_8b.toml --job.dump_folder /runs/run1\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
