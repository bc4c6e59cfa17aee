"""Integration tests as table rows. Each row has one or more runs of the trainer in one run folder.

ROWS = [
    OverrideDefinitions(
        [["--training.steps", "10"], ["--training.steps", "20"]],
        "Save, then resume",
        "full_checkpoint",
        ngpu=2,
        expect=lambda runs: assert_continues(runs[0].metrics, runs[1].metrics),
    ),
]

@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.test_name)
def test_features(row, tmp_path):
    run_row(row, tmp_path)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_like.util.jsonl import read_rows

ROOT = Path(__file__).resolve().parent.parent.parent
TAIL_LINES = 60
# Keys of metrics.jsonl that a resumed run must reproduce to the last bit.
EXACT = (
    "step",
    "n_tokens_seen",
    "num_valid_tokens",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "data_digest",
    "data_digest_chain",
    "skipped",
)


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    returncode: int  # of torchrun, or of the trainer on one rank
    stdout: str  # stdout and stderr of all ranks, interleaved
    metrics: list[dict[str, Any]]  # rows of metrics.jsonl, including earlier runs of the test
    exit: dict[str, Any] | None  # exit.json: reason, code, step
    dump_folder: Path
    seconds: float

    @property
    def tail(self) -> str:
        """The last lines of the output, for error messages."""
        return "\n".join(self.stdout.splitlines()[-TAIL_LINES:])


@dataclass(frozen=True)
class OverrideDefinitions:
    """One test: the command-line arguments of each run, and the checks after all of them.

    ``expect`` receives the results in order and asserts. ``returncodes`` has one expected code per
    run. If it is empty, all runs must return 0. The test stops at the first run with another code.
    """

    override_args: list[list[str]]
    test_descr: str
    test_name: str
    ngpu: int = 2
    expect: Callable[[list[RunResult]], None] | None = None
    config_file: str = "train_configs/debug_model.toml"
    returncodes: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300  # seconds, of each run


def run_row(
    row: OverrideDefinitions, folder: Path, run: Callable[..., RunResult] | None = None
) -> list[RunResult]:
    """Execute the runs of a row in the dump folder ``folder/outputs`` and check the results.

    ``run`` starts one run. The default is ``run_trainer``.
    """
    run = run or run_trainer
    expected_codes = row.returncodes or (0,) * len(row.override_args)
    if len(expected_codes) != len(row.override_args):
        raise ValueError(
            f"{row.test_name}: {len(expected_codes)} return codes for {len(row.override_args)} runs"
        )
    results: list[RunResult] = []
    for number, (overrides, code) in enumerate(
        zip(row.override_args, expected_codes, strict=True), start=1
    ):
        arguments = [
            "--job.config_file",
            row.config_file,
            "--job.dump_folder",
            str(folder / "outputs"),
            *overrides,
        ]
        result = run(arguments, row.ngpu, folder / "outputs", env=row.env, timeout=row.timeout)
        if result.returncode != code:
            raise AssertionError(
                f"{row.test_name} ({row.test_descr}): run {number} of {len(expected_codes)} "
                f"returned {result.returncode}, expected {code}; its last lines:\n{result.tail}"
            )
        results.append(result)
    if row.expect is not None:
        row.expect(results)
    return results


def trainer_command(
    arguments: list[str], ngpu: int, dump_folder: Path, module: str = "torchtitan_like.train"
) -> list[str]:
    """Return the command that run_train.sh runs: torchrun, or the trainer for one rank."""
    trainer = ["-m", module, *arguments]
    if ngpu == 1:
        return [sys.executable, *trainer]
    launcher = ["-m", "torchtitan_like.torchrun", f"--nproc_per_node={ngpu}"]
    launcher += ["--role=rank", "--tee=3", f"--log-dir={dump_folder / 'torchrun'}"]
    return [sys.executable, *launcher, *trainer]


def run_trainer(
    arguments: list[str],
    ngpu: int,
    dump_folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    module: str = "torchtitan_like.train",
) -> RunResult:
    """Run the trainer in the repository's folder and wait until it ends.

    After ``timeout`` seconds, kills all its processes and raises AssertionError with the last lines
    of the output.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        trainer_command(arguments, ngpu, dump_folder, module),
        cwd=ROOT,
        env=trainer_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout = kill_session(process)
        tail = "\n".join(stdout.splitlines()[-TAIL_LINES:])
        raise AssertionError(
            f"the run did not end within {timeout:g} s; its last lines:\n{tail}"
        ) from None
    exit_file = dump_folder / "exit.json"
    return RunResult(
        returncode=process.returncode,
        stdout=stdout,
        metrics=read_rows(dump_folder / "metrics.jsonl"),
        exit=json.loads(exit_file.read_text()) if exit_file.exists() else None,
        dump_folder=dump_folder,
        seconds=time.monotonic() - started,
    )


def trainer_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for a run: this checkout, one thread, unbuffered output."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": python_path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def listen_to_signals() -> None:
    """Restore the default handlers of SIGINT and SIGHUP, as `preexec_fn`.

    Tests in the background or under nohup ignore these signals, and children inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def kill_session(process: subprocess.Popen[str]) -> str:
    """Kill a process that leads a session, and its descendants. Return their output."""
    # torchrun's workers lead separate sessions. List them by their parents, before these end.
    for pid in [*_descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # ended in the meantime
            continue
    return process.communicate()[0] or ""


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
