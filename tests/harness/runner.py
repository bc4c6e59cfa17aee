"""Integration tests as rows of a table: each row is one or more runs of the trainer, in order, in one run folder.

ROWS = [
    OverrideDefinitions(
        [["--checkpoint.enable", "--training.steps", "10"], ["--checkpoint.enable", "--training.steps", "20"]],
        "Saves, then resumes",
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


@dataclass(frozen=True)
class RunResult:
    """One run that has ended."""

    returncode: int  # of torchrun, or of the trainer on one rank
    stdout: str  # with stderr in between, of all ranks
    metrics: list[dict[str, Any]]  # the rows of metrics.jsonl, those of earlier runs of the test included
    exit: dict[str, Any] | None  # exit.json: reason, code, step
    dump_folder: Path
    seconds: float

    @property
    def tail(self) -> str:
        """The last lines of the output, for messages."""
        return "\n".join(self.stdout.splitlines()[-TAIL_LINES:])


@dataclass(frozen=True)
class OverrideDefinitions:
    """One test: what each run adds to the command line, and what must hold after all of them.

    ``expect`` gets the results in order and asserts. ``returncodes`` are those the runs must end with, all 0 if empty:
    the test stops at the first run that ends otherwise.
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


def run_row(row: OverrideDefinitions, folder: Path, run: Callable[..., RunResult] | None = None) -> list[RunResult]:
    """Run all of a row's runs with ``folder/outputs`` as their dump folder and check what the row expects.

    ``run``: what starts them, as ``run_trainer`` does, which is the default.
    """
    run = run or run_trainer
    wanted = row.returncodes or (0,) * len(row.override_args)
    if len(wanted) != len(row.override_args):
        raise ValueError(f"{row.test_name}: {len(wanted)} return codes for {len(row.override_args)} runs")
    results: list[RunResult] = []
    for number, (overrides, code) in enumerate(zip(row.override_args, wanted, strict=True), start=1):
        arguments = ["--job.config_file", row.config_file, "--job.dump_folder", str(folder / "outputs"), *overrides]
        result = run(arguments, row.ngpu, folder / "outputs", env=row.env, timeout=row.timeout)
        if result.returncode != code:
            raise AssertionError(
                f"{row.test_name} ({row.test_descr}): run {number} of {len(wanted)} returned {result.returncode}, "
                f"expected {code}; its last lines:\n{result.tail}"
            )
        results.append(result)
    if row.expect is not None:
        row.expect(results)
    return results


def trainer_command(
    arguments: list[str], ngpu: int, dump_folder: Path, module: str = "torchtitan_like.train"
) -> list[str]:
    """The command of one run: our torchrun, or for one rank the trainer itself, as run_train.sh starts them."""
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
    """Run the trainer in the repository's folder and wait for its end.

    AssertionError with the output's end when it takes more than ``timeout`` seconds; all its processes are killed then.
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
        raise AssertionError(f"the run did not end within {timeout:g} s; its last lines:\n{tail}") from None
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
    """This process's environment for a run: our package found, one thread, no buffering."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def listen_to_signals() -> None:
    """For `preexec_fn`. Tests that were started in the background or by nohup ignore these, and so would their children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def kill_session(process: subprocess.Popen[str]) -> str:
    """Kill a process started with ``start_new_session`` and its descendants; what they had printed."""
    # torchrun's workers lead sessions of their own: they are found through their parents, before those die.
    for pid in [*_descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # ended by itself meanwhile
            continue
    return process.communicate()[0] or ""


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
