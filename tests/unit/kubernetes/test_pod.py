"""`titan k8s pod`: the launch that follows from a pod's index, and the code that the pod returns."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_like.cli import main
from torchtitan_like.cli.k8s.pod import EXAMPLE
from torchtitan_like.kubernetes import pod
from torchtitan_like.process_start import CODES
from torchtitan_like.util.exit_codes import CRASH, WORTH_A_RETRY, ExitCode
from torchtitan_like.util.run_directory import EXIT, RunEnd, write_exit

RUN = Path("runs/train")
LAST = 2  # training.steps of the example


class Trainer:
    """Replaces the launcher and the checkpoints. A launch ends as the test says."""

    def __init__(self) -> None:
        self.step = 0  # of the newest checkpoint
        self.launches: list[tuple[dict[str, str | None], list[str]]] = []
        self.code = int(ExitCode.DONE)
        self.step_after = LAST
        self.is_recorded = True

    def launch(self, options: dict[str, str | None], settings: list[str], words: list[str]) -> int:
        self.launches.append((options, settings))
        self.step = self.step_after
        if self.is_recorded:
            write_exit(RUN, RunEnd("reason", self.code, self.step))
        return self.code

    def steps(self, folder: Path) -> list[Any]:
        assert folder == RUN / "checkpoint"
        return [SimpleNamespace(step=self.step)] if self.step else []


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    trainer = Trainer()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pod, "launch", trainer.launch)
    monkeypatch.setattr(pod, "published_steps", trainer.steps)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    handlers = {number: signal.getsignal(number) for number in CODES}
    yield trainer
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_pod() -> int:
    """Run the example in the help."""
    return main(shlex.split(EXAMPLE)[1:])


@pytest.mark.parametrize(("index", "address"), [("0", "10.0.0.7"), ("1", None), ("12", None)])
def test_the_index_is_the_node_rank(
    trainer: Trainer, index: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pod 0 listens on its own address; the others use MASTER_ADDR."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    assert run_pod() == ExitCode.DONE
    [(options, settings)] = trainer.launches
    assert options == {"node_rank": index, "master_addr": address}
    assert settings[0] == "--job.config_file" and settings[1].endswith("/debug_model.toml")
    assert settings[2:] == ["--training.steps", "2", "--job.dump_folder", str(RUN)]


def test_outside_a_job_nothing_starts(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    assert run_pod() == ExitCode.BAD_CONFIG
    assert "JOB_COMPLETION_INDEX is ''. Expected" in capsys.readouterr().err
    assert trainer.launches == []


def test_a_pod_that_is_replaced_after_the_last_step_ends(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.step = LAST
    assert run_pod() == ExitCode.DONE and trainer.launches == []
    assert "Nothing to do: step 2 of 2 is done already" in capsys.readouterr().out


def test_a_start_that_goes_back_trains(trainer: Trainer) -> None:
    trainer.step = LAST
    assert main([*shlex.split(EXAMPLE)[1:], "--checkpoint.load_step", "1"]) == ExitCode.DONE
    assert len(trainer.launches) == 1


def test_problems_of_the_configuration_are_reported_by_the_launcher(trainer: Trainer) -> None:
    trainer.code = int(ExitCode.BAD_CONFIG)
    assert main([*shlex.split(EXAMPLE)[1:], "--training.stesp", "1"]) == ExitCode.BAD_CONFIG
    assert len(trainer.launches) == 1


@pytest.mark.parametrize("code", [CRASH, *(int(code) for code in ExitCode if code)])
@pytest.mark.parametrize("step_after", [0, 1])
def test_only_a_start_with_a_new_checkpoint_is_not_counted(
    trainer: Trainer, code: int, step_after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.code, trainer.step_after = code, step_after
    expected = code
    if code in WORTH_A_RETRY and step_after:
        expected = int(ExitCode.REQUEUE)
    elif code == ExitCode.REQUEUE:
        expected = CRASH
    assert run_pod() == expected
    assert ("so that this start counts" in capsys.readouterr().err) == (expected != code == 75)


@pytest.mark.parametrize(("step_after", "expected"), [(0, CRASH), (1, int(ExitCode.REQUEUE))])
def test_an_end_without_a_record_is_not_the_end_of_the_run(
    trainer: Trainer, step_after: int, expected: int
) -> None:
    """The replacement of another pod has removed exit.json before this launcher could read it."""
    trainer.is_recorded, trainer.step_after = False, step_after
    assert run_pod() == expected
    assert not (RUN / EXIT).exists()
