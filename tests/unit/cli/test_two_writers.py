"""If two commands write one output, one completes it and the other one refuses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.folders import flip_bit
from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.checkpoint import staged_output
from torchtitan_like.checkpoint.tools import convert, export_step
from torchtitan_like.cli import main as titan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FIRST = "first-writer"
WAIT_SECONDS = 60
REFUSALS = ("belongs to a process that is alive", "exists already")


def ckpt(arguments: list[str]) -> int:
    return titan(["ckpt", *arguments])


@dataclass
class Writers:
    """A command that several threads run on one output at the same time."""

    main: Callable[[list[str]], int]
    arguments: list[str]
    parent: Path  # of the output
    expected: list[str]  # names in `parent` afterwards
    verify: list[Path]

    def assert_complete(self) -> None:
        assert sorted(os.listdir(self.parent)) == self.expected
        for path in self.verify:
            assert ckpt(["verify", str(path)]) == 0


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_step(tmp_path_factory.mktemp("run") / "step-7", MODEL)


@pytest.fixture(params=["hf", "native", "pt"])
def writers(request: pytest.FixtureRequest, step: Path, tmp_path: Path) -> Writers:
    parent = tmp_path / "out"
    out = parent / "model"
    to = request.param
    arguments = ["export", str(step), str(out), "--to", to]
    return Writers(ckpt, arguments, parent, ["model"], [] if to == "pt" else [out])


def pause_first_writer(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str
) -> tuple[threading.Event, threading.Event]:
    """Pause the first writer before or after `owner.name`.

    Returns two events: the writer has arrived, and it may continue.
    """
    arrived, may_continue = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def pause() -> None:
        if threading.current_thread().name == FIRST and not may_continue.is_set():
            arrived.set()
            assert may_continue.wait(WAIT_SECONDS)

    def paused(*args: Any, **options: Any) -> Any:
        if when == "before":
            pause()
        result = original(*args, **options)
        if when == "after":
            pause()
        return result

    monkeypatch.setattr(owner, name, paused)
    return arrived, may_continue


def start(main: Callable[[], int], codes: dict[str, int], name: str) -> threading.Thread:
    thread = threading.Thread(target=lambda: codes.update({name: main()}), name=name)
    thread.start()
    return thread


POINTS = {
    "locked": (staged_output.StagedOutput, "__enter__", "after"),
    "before the final name": (staged_output.StagedOutput, "publish", "before"),
    "after the final name": (staged_output.StagedOutput, "publish", "after"),
}


@pytest.mark.parametrize("point", POINTS)
def test_the_first_writer_completes_and_the_second_one_refuses(
    writers: Writers,
    point: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrived, may_continue = pause_first_writer(monkeypatch, *POINTS[point])
    codes: dict[str, int] = {}
    first = start(lambda: writers.main(writers.arguments), codes, FIRST)
    assert arrived.wait(WAIT_SECONDS)
    assert writers.main(writers.arguments) == 2
    assert "belongs to a process that is alive" in capsys.readouterr().err
    may_continue.set()
    first.join(WAIT_SECONDS)
    assert codes == {FIRST: 0}
    writers.assert_complete()


@pytest.mark.parametrize("offset", [0.0, 0.01, 0.03, 0.1])
def test_writers_that_start_at_any_time_leave_one_complete_output(
    writers: Writers, offset: float, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: dict[str, int] = {}
    threads = []
    for number in range(2):
        threads.append(start(lambda: writers.main(writers.arguments), codes, str(number)))
        time.sleep(offset)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    output = capsys.readouterr().err
    assert sorted(codes.values()) == [0, 2], output
    assert any(words in output for words in REFUSALS), output
    writers.assert_complete()


@pytest.mark.parametrize("fault", ["flipped bit", "missing file"])
def test_an_export_damaged_during_writing_is_not_published(
    step: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """A faulty disk or another program may damage files."""

    def damage(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_and_damage(folder: Path, *args: Any, **options: Any) -> Any:
            records = write(folder, *args, **options)
            file = folder / "model.safetensors"
            flip_bit(file, file.stat().st_size - 1) if fault == "flipped bit" else file.unlink()
            return records

        return write_and_damage

    monkeypatch.setattr(export_step, "write_model", damage(export_step.write_model))
    monkeypatch.setattr(convert, "write_model", damage(convert.write_model))
    out = tmp_path / "out" / "model"
    dcp = tmp_path / "dcp"
    assert ckpt(["export", str(step), str(dcp), "--to", "dcp"]) == 0
    assert ckpt(["export", str(step), str(out)]) == 1
    assert ckpt(["export", str(dcp), str(out), "--config", str(step / "config.toml")]) == 1
    words = "model.safetensors is " + ("damaged" if fault == "flipped bit" else "missing")
    assert capsys.readouterr().err.count(words) == 2
    assert os.listdir(tmp_path / "out") == []
