"""scripts/emulate_multinode.sh: several torchruns on one machine form one run and end together."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.parity import short_documents
from tests.harness.ports import listening_addresses
from tests.harness.runner import ROOT, kill_session, listen_to_signals, trainer_environment
from tests.integration.forked import ForkedTrainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

BAD_CONFIG = 78
EXACT = (
    "step",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "n_tokens_seen",
    "num_valid_tokens",
    "data_digest",
)
# A fake run_train.sh that prints its arguments and variables.
STUB = """#!/usr/bin/env bash
devices=${CUDA_VISIBLE_DEVICES-unset}
echo "devices=$devices $NNODES x $NGPU at $MASTER_ADDR:$MASTER_PORT $RDZV_ID, args: $*"
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with three scripts, on a machine without GPUs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/emulate_multinode.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup_env.sh").write_text("setup_env() { PYTHON=python3; }\n")
    (tmp_path / "bin").mkdir()
    write_script(tmp_path / "run_train.sh", STUB)
    write_script(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nexit 9\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def emulate(root: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "scripts/emulate_multinode.sh"), *map(str, arguments)]
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
    )


@pytest.mark.parametrize("arguments", [(), (2,), (0, 1), (2, "x"), ("--training.steps", 5)])
def test_numbers_of_nodes_and_ranks_are_required(
    repository: Path, arguments: tuple[object, ...]
) -> None:
    result = emulate(repository, *arguments)
    assert result.returncode == BAD_CONFIG and "NNODES PER_NODE" in result.stderr


def test_help_shows_the_usage(repository: Path) -> None:
    result = emulate(repository, "--help")
    assert result.returncode == 0 and "NNODES PER_NODE [--section.key value ...]" in result.stdout
    assert "set -" not in result.stdout


def test_every_node_gets_the_same_rendezvous(repository: Path) -> None:
    result = emulate(repository, 3, 2, "--job.description", "two words")
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line[:8] for line in lines] == ["[node0] ", "[node1] ", "[node2] "]
    (output,) = {line[8:] for line in lines}
    assert output.startswith("devices=unset 3 x 2 at 127.0.0.1:")
    assert output.endswith(", args: --job.description two words")


@pytest.mark.parametrize(
    ("visible", "slices"),
    [(None, ["0,1", "2,3"]), ("7,5, 3,1,0", ["7,5", "3,1"]), ("", [""] * 2), ("-1", ["-1"] * 2)],
)
def test_each_node_sees_a_slice_of_the_gpus(
    repository: Path, visible: str | None, slices: list[str]
) -> None:
    write_script(repository / "bin/nvidia-smi", "#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n4\\n'\n")
    result = emulate(
        repository, 2, 2, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    )
    assert sorted(line.split()[:2] for line in result.stdout.splitlines()) == [
        [f"[node{node}]", f"devices={devices}"] for node, devices in enumerate(slices)
    ]


def test_too_few_gpus_are_rejected(repository: Path) -> None:
    write_script(repository / "bin/nvidia-smi", "#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    result = emulate(repository, 2, 2)
    assert (result.returncode, result.stdout) == (BAD_CONFIG, "")
    assert "2 nodes of 2 need 4 GPUs, here are 3" in result.stderr


WAITING_SCRIPT = """#!/usr/bin/env bash
trap 'echo "got $1" > {folder}/ended-$$; exit 75' TERM INT
touch {folder}/started-$$
echo started
{first}
while :; do sleep 0.05; done
"""


def test_failed_node_ends_the_others(repository: Path) -> None:
    """The first node to create a folder fails after all have started; the run returns its code."""
    all_started = f"until [ $(ls {repository}/started-* | wc -l) = 3 ]; do sleep 0.05; done"
    first = f"if mkdir {repository}/taken 2>/dev/null; then {all_started}; exit 3; fi"
    write_script(repository / "run_train.sh", WAITING_SCRIPT.format(folder=repository, first=first))
    result = emulate(repository, 3, 1, GRACE_SECONDS="0")
    assert result.returncode == 3
    assert "A node has ended with 3; ending the others." in result.stderr
    assert len(list(repository.glob("ended-*"))) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_every_node(repository: Path, number: signal.Signals) -> None:
    """Terminals send signals to the whole process group."""
    write_script(repository / "run_train.sh", WAITING_SCRIPT.format(folder=repository, first=""))
    command = [str(repository / "scripts/emulate_multinode.sh"), "2", "1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_signals,
    )
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [
        "[node0] started\n",
        "[node1] started\n",
    ]
    os.killpg(process.pid, number)
    assert process.wait(timeout=100) == 75
    process.stdout.close()
    assert len(list(repository.glob("ended-*"))) == 2


# ---- with the trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    short_documents(folder)
    return folder


def arguments(data: Path, folder: Path, steps: int, **more: object) -> list[str]:
    """Return arguments for a smaller debug model without checkpoints and TensorBoard."""
    values = {
        "job.dump_folder": folder,
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "model.args.multiple_of": 16,
        "training.dataset_path": data / "short.jsonl",
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.steps": steps,
        "lr_scheduler.warmup_steps": 0,
        "data.cache_folder": data / "tokens",
        "data.mask_document_starts": "true",
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "metrics.enable_tensorboard": "false",
        "metrics.log_freq": 1,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return ["--job.config_file", "train_configs/debug_model.toml"] + [
        part for key, value in values.items() for part in (f"--{key}", str(value))
    ]


def start_nodes(arguments: list[str], ranks_per_node: int = 1) -> subprocess.Popen[str]:
    """Start 2 nodes in a new session, with stderr redirected to stdout."""
    return subprocess.Popen(
        [str(ROOT / "scripts/emulate_multinode.sh"), "2", str(ranks_per_node), *arguments],
        cwd=ROOT,
        env=trainer_environment(
            {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "GRACE_SECONDS": "5"}
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_signals,
    )


HYBRID = {
    "parallelism__data_parallel_replicate_degree": 2,
    "parallelism__data_parallel_shard_degree": 2,
}
ACROSS_NODES = "shards layers across nodes"  # a warning of the config check
STAGES = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_first_stage_less_layers": 0,
    "parallelism__pipeline_parallel_last_stage_less_layers": 0,
    "lr_scheduler__total_steps": 2,  # independent of training.steps
}


def exact_values(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row[key] for key in EXACT] for row in rows]


@pytest.mark.nightly  # tests/slurm compares a job on two nodes with one node in every run
def test_two_nodes_equal_one_node(data: Path, run_forked: ForkedTrainer, tmp_path: Path) -> None:
    """HSDP with sharding within nodes is bit-equal to 4 ranks of one node."""
    one_node = run_forked(arguments(data, tmp_path / "one", 2, **HYBRID), 4, tmp_path / "one")
    assert one_node.returncode == 0, one_node.tail
    process = start_nodes(arguments(data, tmp_path / "two", 2, **HYBRID), ranks_per_node=2)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        kill_session(process)
    assert process.returncode == 0, output[-4000:]
    assert all(line.startswith(("[node0] ", "[node1] ")) for line in output.splitlines())
    assert {line[:7] for line in output.splitlines() if "Training completed" in line} == {
        "[node0]",
        "[node1]",
    }
    rows = read_rows(tmp_path / "two/metrics.jsonl")
    assert exact_values(rows) == exact_values(one_node.metrics)
    assert len(rows) == 2
    logs = sorted(path.name for path in (tmp_path / "two/attempts/1/logs").iterdir())
    assert logs == [f"rank{rank}.log" for rank in range(4)]
    assert (
        "4 ranks = dp_replicate 2 x dp_shard 2, on 2 nodes of 2" in output
        and "Applied HSDP" in output
    )
    assert ACROSS_NODES not in output


@pytest.mark.nightly
def test_killed_rank_ends_both_nodes(data: Path, tmp_path: Path) -> None:
    """Layers are sharded across the nodes, so the config check prints a warning."""
    process = start_nodes(
        arguments(data, tmp_path / "run", 100_000, parallelism__tensor_parallel_degree=2)
    )
    assert process.stdout is not None
    try:
        before = list(
            itertools.takewhile(lambda line: not re.search(r"step: +2 ", line), process.stdout)
        )
        assert any(ACROSS_NODES in line for line in before), before
        processes = psutil.Process(process.pid).children(recursive=True)
        assert set(listening_addresses(child.pid for child in processes)) == {"127.0.0.1"}
        victim = next(child for child in processes if is_rank(child))
        victim.kill()
        killed = time.monotonic()
        process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode == ExitCode.LOST_PEER
    assert time.monotonic() - killed < 60
    assert not [
        child
        for child in processes
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.nightly
def test_signal_ends_both_nodes_by_agreement(
    data: Path, run_forked: ForkedTrainer, tmp_path: Path
) -> None:
    """Each node is a pipeline stage. Until the signal, the metrics are bit-equal to one node's."""
    process = start_nodes(arguments(data, tmp_path / "run", 100_000, **STAGES))
    assert process.stdout is not None
    try:
        next(line for line in process.stdout if re.search(r"step: +2 ", line))
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode == ExitCode.INTERRUPTED, output[-4000:]
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == ExitCode.INTERRUPTED
    one_node = run_forked(arguments(data, tmp_path / "one", 2, **STAGES), 2, tmp_path / "one")
    assert exact_values(read_rows(tmp_path / "run/metrics.jsonl"))[:2] == exact_values(
        one_node.metrics
    )
    assert len(one_node.metrics) == 2


def is_rank(process: psutil.Process) -> bool:
    """Return True for a rank, and False for torchrun processes."""
    try:
        return (
            "torchtitan_like.train" in process.cmdline()
            and "torchtitan_like.torchrun" not in process.cmdline()
        )
    except psutil.Error:
        return False


@pytest.fixture(autouse=True)
def _no_process_remains(tmp_path: Path) -> Iterator[None]:
    yield
    processes = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    _, remaining = psutil.wait_procs(processes, timeout=60)  # killed processes end with a delay
    assert not remaining, f"processes {remaining} still run"
