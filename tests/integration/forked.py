"""Runs of the trainer with forked ranks: a start takes one second instead of six.

They equal runs under torchrun bit for bit (tests/integration/test_resume.py compares them). Only
the rank prefix of log lines is missing, and rank 0 has another sys.argv.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.trainer import Starter
from tests.harness.runner import RunResult
from torchtitan_like.util.jsonl import read_rows


@dataclass(frozen=True)
class ForkedTrainer:
    """A replacement for `runner.run_trainer` that cannot set environment variables."""

    starter: Starter

    def __call__(
        self, arguments: list[str], ngpu: int, dump_folder: Path, *,
        env: Mapping[str, str] | None = None, timeout: float = 300,
    ) -> RunResult:  # fmt: skip
        assert not env, "forked ranks have the environment of the fork server"
        started = time.monotonic()
        run = self.starter.start(arguments, ngpu, dump_folder).wait(timeout)
        return RunResult(
            returncode=next((code for code in run.codes if code), 0),
            stdout=run.output,
            metrics=read_rows(dump_folder / "metrics.jsonl"),
            exit=run.exit,
            dump_folder=dump_folder,
            seconds=time.monotonic() - started,
        )
