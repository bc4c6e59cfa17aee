"""Runs of the real trainer that tests can kill, with torchrun or with forked ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.faults.fork_server import GRACE_SECONDS
from tests.faults.injection import Injection
from tests.harness.runner import (
    EXACT,
    ROOT,
    kill_session,
    trainer_command,
    trainer_environment,
)

ASSETS = ROOT / "tests/assets/checkpoints"


def arguments(folder: Path, **overrides: Any) -> list[str]:
    """Return the command line of a tiny run: 13,000 parameters, steps of 4 out of 25 samples.

    None removes a setting.
    """
    values = {
        "job.config_file": ROOT / "train_configs/debug_model.toml",
        "job.show_results": "false",
        "job.dump_folder": folder,
        "model.hf_assets_path": ASSETS / "tokenizer",
        "model.args.dim": 32,
        "model.args.n_layers": 1,
        "model.args.n_heads": 4,
        "model.args.multiple_of": 16,
        "model.args.vocab_size": 32,
        "model.args.max_seq_len": 64,
        "training.dataset_path": ASSETS / "text.jsonl",
        "training.seq_len": 16,
        "training.global_batch_size": 4,
        "training.local_batch_size": 1,
        "training.steps": 40,
        "lr_scheduler.warmup_steps": 3,
        "lr_scheduler.total_steps": 40,
        "data.cache_folder": folder.parent / "tokens",
        "checkpoint.enable": "true",
        "checkpoint.interval": 1,
        "checkpoint.keep_latest_k": 3,
        "checkpoint.last_save_model_only": "false",
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "validation.enable": "false",
        "debug.seed": 1,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    given = {key: value for key, value in values.items() if value is not None}
    return [part for key, value in given.items() for part in (f"--{key}", str(value))]


def exact_rows(folder: Path) -> list[list[Any]]:
    """Return the EXACT keys of each complete row of metrics.jsonl, with floats as hex strings."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A killed process may leave an incomplete last line.
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [[v.hex() if isinstance(v := row[key], float) else v for key in EXACT] for row in rows]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run. `codes` has the exit code of each rank or of torchrun; negative: a signal."""

    codes: list[int]
    output: str = field(repr=False)
    exit: dict[str, Any] | None

    @property
    def tail(self) -> str:
        """Return the errors in the output, and its last lines, for messages."""
        lines = [line[:400] for line in self.output.splitlines()]
        error_lines = [
            line for line in lines[:-8] if re.search("ERROR|WARNING|Error|Traceback", line)
        ]
        return "\n".join([*error_lines[-20:], *lines[-8:]])

    def has_output(self, words: str) -> bool:
        """Return True if the output contains `words`. `in` would make pytest print the output."""
        return words in self.output


class Run(Protocol):
    """A started run."""

    def is_over(self) -> bool:
        """Return True if all ranks have ended."""

    def pids(self) -> dict[int, int]:
        """Return the pids by rank."""

    def wait(self, timeout: float = 90) -> FinishedRun:
        """Wait for the end of the run.

        After `timeout` seconds, kill all ranks and raise AssertionError with the end of the output.
        """


class Starter(Protocol):
    """Starts runs of the trainer."""

    name: str
    grace: float  # seconds in which the other ranks may end after a crash

    def start(
        self,
        argv: list[str],
        num_ranks: int,
        folder: Path,
        injections: Sequence[Injection] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Run: ...


def kill(pids: list[int]) -> list[int]:
    """Send SIGKILL to all pids and return the pids that existed."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # already ended
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def read_exit_file(folder: Path) -> dict[str, Any] | None:
    path = folder / "exit.json"
    return json.loads(path.read_text()) if path.exists() else None


class Torchrun:
    """Starts runs with the command of run_train.sh."""

    name = "torchrun"
    grace = 5.0

    def __init__(self, env: Mapping[str, str], *options: str) -> None:
        self.env = env
        self.options = options  # of torchrun

    def start(
        self,
        argv: list[str],
        num_ranks: int,
        folder: Path,
        injections: Sequence[Injection] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        command, env = trainer_command(argv, num_ranks, folder), dict(self.env)
        if injections or settings:
            command = [
                {"torchtitan_like.train": "tests.faults.injection"}.get(part, part)
                for part in command
            ]
            env["FAULT_INJECTIONS"] = json.dumps(
                {"injections": injections, "settings": settings or {}}
            )
        command[3:3] = self.options
        return _TorchrunRun(command, folder, env)


class _TorchrunRun:
    def __init__(self, command: list[str], folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.log = folder.parent / "output.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=trainer_environment(env), text=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def pids(self) -> dict[int, int]:
        """Return the trainer processes under torchrun, without data workers, by their RANK."""
        import psutil

        pids: dict[int, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in [top, *top.children(recursive=True)]:  # parents before their children
                with contextlib.suppress(psutil.Error):
                    command = process.cmdline()
                    is_trainer = {"torchtitan_like.train", "tests.faults.injection"} & {
                        *command
                    } and "torchtitan_like.torchrun" not in command
                    if is_trainer and process.ppid() not in pids.values():
                        pids[int(process.environ().get("RANK", 0))] = process.pid
        return pids

    def wait(self, timeout: float = 90) -> FinishedRun:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            kill_session(self.process)
            raise AssertionError(
                f"the run did not end within {timeout:g} s:\n{self.log.read_text()[-3000:]}"
            ) from None
        return FinishedRun(
            [self.process.returncode],
            self.log.read_text(errors="replace"),
            read_exit_file(self.folder),
        )


class ForkServer:
    """Starts runs with ranks forked from a process with all imports; one run at a time."""

    name = "forked"
    grace = GRACE_SECONDS

    def __init__(self, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server"],
            cwd=ROOT, env=trainer_environment(env), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.buffer = b""
        assert self.answer(120) == {"ready": True}

    def start(
        self,
        argv: list[str],
        num_ranks: int,
        folder: Path,
        injections: Sequence[Injection] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder.parent / "output.log"
        log.unlink(missing_ok=True)
        assert self.process.stdin is not None
        request = {
            "argv": argv,
            "num_ranks": num_ranks,
            "log": str(log),
            "injections": injections,
            "settings": settings or {},
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        return _ForkedRun(self, self.answer(30)["pids"], folder, log)

    def answer(self, timeout: float) -> dict[str, Any]:
        """Return the next answer of the process. Raise TimeoutError after `timeout` seconds."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            if not select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                raise AssertionError("the fork server has died")
            self.buffer += piece
        line, self.buffer = self.buffer.split(b"\n", 1)
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()  # its ranks are killed too, and their workers notice it
        self.process.communicate(timeout=60)


class _ForkedRun:
    def __init__(self, server: ForkServer, pids: list[int], folder: Path, log: Path) -> None:
        self.server, self.folder, self.log = server, folder, log
        self._pids = pids
        self.codes: list[int] | None = None

    def is_over(self) -> bool:
        if self.codes is None:
            with contextlib.suppress(TimeoutError):
                self.codes = self.server.answer(0)["codes"]
        return self.codes is not None

    def pids(self) -> dict[int, int]:
        return dict(enumerate(self._pids))

    def wait(self, timeout: float = 90) -> FinishedRun:
        is_late = False
        if self.codes is None:
            try:
                self.codes = self.server.answer(timeout)["codes"]
            except TimeoutError:
                is_late = True
                kill(self._pids)
                self.codes = self.server.answer(30)["codes"]
        output = self.log.read_text(errors="replace") if self.log.exists() else ""
        if is_late:
            raise AssertionError(f"the run did not end within {timeout:g} s:\n{output[-3000:]}")
        return FinishedRun(self.codes, output, read_exit_file(self.folder))
