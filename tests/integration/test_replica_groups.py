"""Replica groups over torchft: one is killed and returns while the other one trains."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runner import (
    ROOT,
    kill_session,
    listen_to_signals,
    trainer_command,
    trainer_environment,
)
from torchtitan_like.checkpoint.step_folders import published_steps, read_manifest
from torchtitan_like.checkpoint.tools.diff import compare_checkpoints
from torchtitan_like.cli import main as titan
from torchtitan_like.config.sections_training import Data, Training
from torchtitan_like.data.batches.batch import chain_digest
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.util.bundle import TOKENIZER
from torchtitan_like.util.jsonl import read_rows

pytestmark = pytest.mark.nightly

SEED, BATCH, SEQ_LEN, INTERVAL = 42, 4, 32, 10
SMALL = {
    "job.config_file": "train_configs/debug_model.toml",
    "metrics.log_freq": "1",
    "metrics.enable_tensorboard": "false",
    "model.args.dim": "32",
    "model.args.n_layers": "2",
    "model.args.n_heads": "2",
    "training.dataset": "shakespeare_validation",
    "training.local_batch_size": "1",
    "training.global_batch_size": str(2 * BATCH),
    "training.seq_len": str(SEQ_LEN),
    "validation.enable": "false",
    "checkpoint.interval": str(INTERVAL),
    "checkpoint.keep_latest_k": "0",
    "debug.seed": str(SEED),
    "fault_tolerance.enable": "true",
    "fault_tolerance.group_size": "2",
}
ENDLESS = {"training.steps": "1000000"}


class Job:
    """A lighthouse and its replica groups, in one dump folder."""

    def __init__(self, folder: Path, lighthouse: str, ngpu: int, settings: dict[str, str]) -> None:
        self.folder = folder
        self._lighthouse = lighthouse
        self._ngpu = ngpu
        self._settings = {**settings, "job.dump_folder": str(folder)}
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._logs: dict[int, Path] = {}

    def run_folder(self, group: int) -> Path:
        return self.folder / f"replica_{group}"

    def start(self, group: int) -> None:
        """Start a replica group. Its output goes to a file."""
        settings = {**self._settings, "fault_tolerance.replica_id": str(group)}
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        self._logs[group] = self.folder / f"log_{group}"
        with self._logs[group].open("a") as log:
            self._processes[group] = subprocess.Popen(
                trainer_command(arguments, self._ngpu, self.run_folder(group)), cwd=ROOT,
                env=trainer_environment({"TORCHFT_LIGHTHOUSE": self._lighthouse}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, preexec_fn=listen_to_signals,
            )  # fmt: skip

    def kill(self, group: int) -> None:
        """Kill all processes of a group with SIGKILL."""
        kill_session(self._processes.pop(group))

    def kill_for_a_while(self, group: int) -> int:
        """Kill one of two groups, and start it again later. Returns the other one's step then."""
        other = 1 - group
        self.kill(group)
        lost_at = self.step(other)
        self.wait_for(lambda: self.step(other) > lost_at + 2 * INTERVAL)
        returned_at = self.step(other)
        self.start(group)
        return returned_at

    def stop(self, group: int) -> int:
        """Ask a group to save and end. Returns the exit code of its launcher."""
        process = self._processes.pop(group)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(100)
        finally:
            kill_session(process)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is met. All groups must be running."""
        deadline = time.monotonic() + 300
        while not condition():
            for group, process in self._processes.items():
                tail = "\n".join(self._logs[group].read_text().splitlines()[-40:])
                assert process.poll() in (None, 0), f"group {group} has ended:\n{tail}"
                assert time.monotonic() < deadline, tail
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait until all groups have trained their last step."""
        for process in self._processes.values():
            assert process.wait(300) == 0

    def rows(self, group: int) -> list[dict[str, Any]]:
        return read_rows(self.run_folder(group) / "metrics.jsonl")

    def step(self, group: int) -> int:
        """Return the last step of a group."""
        rows = self.rows(group)
        return int(rows[-1]["step"]) if rows else 0

    def checkpoints(self, group: int) -> dict[int, Path]:
        steps = published_steps(self.run_folder(group) / "checkpoint")
        return {one.step: one.path for one in steps}

    def train_together(self, step: int) -> int:
        """Wait until both groups have trained together after `step`. Returns a checkpoint of both."""

        def joint_steps() -> list[int]:
            return [row["step"] for row in self.rows(1) if row["step"] > step]

        def common() -> int:
            return max(self.checkpoints(0).keys() & self.checkpoints(1).keys(), default=0)

        self.wait_for(lambda: len(joint_steps()) > INTERVAL)
        first = joint_steps()[0]
        self.wait_for(lambda: common() >= first + 2 * INTERVAL)
        return common()

    def close(self) -> None:
        for process in self._processes.values():
            kill_session(process)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    pytest.importorskip("torchft", reason="needs the extra ft")
    command = [
        sys.executable,
        "-m",
        "torchtitan_like.distributed.lighthouse",
        "--bind",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(
        [*command, "--heartbeat-timeout-ms", "1500", "--join-timeout-ms", "5000"],
        cwd=ROOT, env=trainer_environment(), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rpartition("=")[2]
    finally:
        process.terminate()
        assert process.wait(20) == 0


@contextmanager
def job(folder: Path, lighthouse: str, ngpu: int, settings: dict[str, str]) -> Iterator[Job]:
    folder.mkdir()
    groups = Job(folder, lighthouse, ngpu, settings)
    try:
        yield groups
    finally:
        groups.close()


def chain_of(group: int, num_steps: int, folder: Path) -> int:
    """Return the digest chain of a group's first batches, read by one process."""
    builder = DataBuilder(Data(), load_tokenizer(str(TOKENIZER)), str(folder))
    batches = builder.train_batches(
        Training(dataset="shakespeare_validation", local_batch_size=BATCH, seq_len=SEQ_LEN),
        seed=SEED,
        global_batch_size=2 * BATCH,
        replica_group=(group, 2),
    )
    chain = 0
    for _ in range(num_steps):
        chain = chain_digest(chain, next(batches).digest)
    return chain


def check_positions(checkpoint: Path, folder: Path) -> list[int]:
    """Check that the weights have seen each group's samples once and in order. Returns steps."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    groups = manifest["data"]["replica_groups"]
    counts = []
    for group, state in enumerate(groups):
        num_steps, rest = divmod(state["position"], 2 * BATCH)
        assert rest == 0
        assert state["digest_chain"] == chain_of(group, num_steps, folder)
        counts.append(num_steps)
    return counts


def assert_equal_tensors(one: Path, other: Path) -> None:
    lines, summary = compare_checkpoints(one, other, lambda *_: None)
    tensors = [line for line in lines if line.startswith(("model.", "optimizer.", "ema."))]
    number, _, total = summary.partition(" of ")
    assert not tensors and number == total.split()[0], (tensors, summary)


@pytest.mark.parametrize("ngpu", [1, 2])
def test_a_killed_group_returns_and_the_other_one_never_stops(
    ngpu: int, lighthouse: str, tmp_path: Path
) -> None:
    averaged = {"ema.enable": "true"}  # the group that returns receives the average too
    with job(tmp_path / "job", lighthouse, ngpu, {**SMALL, **ENDLESS, **averaged}) as groups:
        for group in (0, 1):
            groups.start(group)
        groups.wait_for(lambda: min(groups.step(0), groups.step(1)) > 2 * INTERVAL)
        returned_at = groups.kill_for_a_while(1)
        last = groups.train_together(returned_at)
        for group in (0, 1):
            groups.stop(group)

    steps = [row["step"] for row in groups.rows(0)]
    # Every step since it has joined, in one attempt.
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    attempts = [len(list(groups.run_folder(group).glob("attempts/*"))) for group in (0, 1)]
    assert attempts == [1, 2]
    rows = {row["step"]: row for row in groups.rows(0)}
    joint = [row for row in groups.rows(1) if returned_at < row["step"] <= last]
    assert len(joint) >= INTERVAL
    for row in joint:
        other = rows[row["step"]]
        for key in ("loss", "grad_norm", "num_valid_tokens", "n_tokens_seen", "lr"):
            assert row[key].hex() == other[key].hex() if isinstance(row[key], float) else (
                row[key] == other[key]
            ), (row, other)  # fmt: skip
    one, other = (groups.checkpoints(group)[last] for group in (0, 1))
    assert_equal_tensors(one, other)
    counts = check_positions(one, tmp_path / "data")
    assert counts == check_positions(other, tmp_path / "data")
    assert counts[0] == last + 1 - steps[0]
    assert 2 * INTERVAL < counts[1] < last - INTERVAL  # the killed group has missed some


def test_two_groups_take_the_steps_of_one_run(
    lighthouse: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups of one rank have the numbers of one run on two ranks, if none is lost."""
    monkeypatch.chdir(ROOT)
    steps = {"training.steps": "12", "fault_tolerance.min_replica_size": "2"}
    with job(tmp_path / "job", lighthouse, 1, {**SMALL, **steps}) as groups:
        for group in (0, 1):
            groups.start(group)
        groups.finish()
    plain = {**SMALL, "training.steps": "12", "job.dump_folder": str(tmp_path / "plain")}
    arguments = [f"--{k}={v}" for k, v in plain.items() if not k.startswith("fault_tolerance")]
    command = trainer_command(arguments, 2, tmp_path / "plain")
    subprocess.run(command, cwd=ROOT, env=trainer_environment(), check=True, timeout=300)
    for group in (0, 1):
        pairs = zip(groups.rows(group), read_rows(tmp_path / "plain/metrics.jsonl"), strict=True)
        for row, expected in pairs:
            for key in ("loss", "grad_norm"):
                assert row[key] == pytest.approx(expected[key], rel=1e-5), (row, expected)
            for key in ("step", "n_tokens_seen", "num_valid_tokens", "lr"):
                assert row[key] == expected[key]
        saved = groups.checkpoints(group)[12]
        assert titan(["data", "show", str(saved), "--step", "5"]) == 0
        shown = capsys.readouterr().out
        assert shown.count(" epoch 0 sample ") == BATCH and "the same" in shown


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_semi_sync_groups_have_equal_weights_after_a_kill(
    method: str, lighthouse: str, tmp_path: Path
) -> None:
    settings = {
        **SMALL,
        **ENDLESS,
        "fault_tolerance.semi_sync_method": method,
        "fault_tolerance.sync_steps": str(INTERVAL // 2),
    }
    with job(tmp_path / "job", lighthouse, 1, settings) as groups:
        for group in (0, 1):
            groups.start(group)
        groups.wait_for(lambda: min(groups.step(0), groups.step(1)) > 2 * INTERVAL)
        returned_at = groups.kill_for_a_while(1)
        last = groups.train_together(returned_at)
        for group in (0, 1):
            groups.stop(group)
    one, other = (groups.checkpoints(group)[last] for group in (0, 1))
    lines, _ = compare_checkpoints(one, other, lambda *_: None)
    shared = ("model.", "fault_tolerance.StreamingDiLoCoFragment_")
    assert not [line for line in lines if line.startswith(shared)], lines
    assert check_positions(one, tmp_path / "data") == check_positions(other, tmp_path / "data")


def test_torchtitans_debug_file_trains(lighthouse: str, tmp_path: Path) -> None:
    """TorchTitan 0.2.2's debug file of DiLoCo, unchanged except for sizes that fit two CPU ranks."""
    settings = {
        "job.config_file": "tests/assets/torchtitan/llama3_ft_debug_model.toml",
        "training.local_batch_size": "1", "training.seq_len": "64", "training.steps": "20",
        "model.name": "llama3_ft", "fault_tolerance.group_size": "2",
    }  # fmt: skip
    with job(tmp_path / "job", lighthouse, 1, settings) as groups:
        for group in (0, 1):
            groups.start(group)
        groups.finish()
    for group in (0, 1):
        losses = [row["loss"] for row in groups.rows(group)]
        assert min(losses[-3:]) < losses[0] - 0.15


def test_torchtitans_integration_case_trains(lighthouse: str, tmp_path: Path) -> None:
    """The arguments of TorchTitan 0.2.2's tests/integration_tests/ft.py: one group of 8 ranks."""
    command = [
        str(ROOT / "run_train.sh"), "--fault_tolerance.enable",
        "--fault_tolerance.replica_id=0", "--fault_tolerance.group_size=8",
        "--job.dump_folder", str(tmp_path / "default_torchft"),
        "--training.steps", "10", "--checkpoint.enable_checkpoint",
        "--training.local_batch_size", "2", "--training.seq_len", "64",  # for few CPU cores
    ]  # fmt: skip
    variables = {
        "PYTHON": sys.executable, "NGPU": "8", "TORCHFT_LIGHTHOUSE": lighthouse,
        "CONFIG_FILE": "tests/integration/torchtitan_base.toml",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=trainer_environment(variables), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = read_rows(tmp_path / "default_torchft/replica_0/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["loss"] < rows[0]["loss"]
