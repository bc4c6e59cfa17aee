"""Runs of the trainer whose ranks are forked from a process that has all imported: a second each instead of six.

What they do is what runs under torchrun do (tests/integration/test_resume.py compares both to the last bit); only their
lines bear no rank, and rank 0's sys.argv is not theirs.
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
    """Takes the place of `runner.run_trainer`, without an environment of the run's own."""

    starter: Starter

    def __call__(
        self, arguments: list[str], ngpu: int, dump_folder: Path, *, env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> RunResult:  # fmt: skip
        assert not env, "forked ranks have the environment of the process that forks them"
        started = time.monotonic()
        ended = self.starter.start(arguments, ngpu, dump_folder).wait(timeout)
        return RunResult(
            returncode=next((code for code in ended.codes if code), 0),
            stdout=ended.output,
            metrics=read_rows(dump_folder / "metrics.jsonl"),
            exit=ended.exit,
            dump_folder=dump_folder,
            seconds=time.monotonic() - started,
        )
