"""Log lines have TorchTitan's format, appear once, and are colored only on terminals."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from torchtitan_like.monitor import log
from torchtitan_like.monitor.memory import MemoryReading
from torchtitan_like.monitor.sinks import Console
from torchtitan_like.monitor.throughput import Progress
from torchtitan_like.util.output import on_screen


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    before, level = list(log.logger.handlers), log.logger.level
    yield
    log.add_file(None)
    log.logger.handlers[:] = before
    log.logger.setLevel(level)


def test_a_line_is_printed_once_and_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    log.init_logger()
    log.init_logger()
    log.logger.info("hello")
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"\[titan\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - root - INFO - hello\n", out
    )
    assert err == ""


def test_each_line_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    monkeypatch.setattr(sys, "stdout", pipe := Pipe())
    log.init_logger()
    log.logger.warning("now")
    assert pipe.flushed.endswith(" - root - WARNING - now\n")


def test_the_log_file_has_no_colors_and_can_be_replaced(tmp_path: Path) -> None:
    log.init_logger()
    first, second = tmp_path / "logs" / "a.log", tmp_path / "b.log"
    log.add_file(first)
    log.logger.info("loss: 1.0", extra=on_screen("\x1b[32mloss 1.0\x1b[0m"))
    log.add_file(second)
    log.logger.info("later")
    log.add_file(None)
    log.logger.info("console only")
    assert first.read_text().endswith("INFO - loss: 1.0\n") and first.read_text().count("\n") == 1
    assert second.read_text().endswith("INFO - later\n") and second.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("terminal", "disabled", "no_color", "expected"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_colors_only_on_a_terminal_that_supports_them(
    terminal: bool, disabled: bool, no_color: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert log.use_colors(disabled, stream) is expected
    assert log.paint("x", "red", False) == "x" and log.paint("x", "red", True) == "\x1b[31mx\x1b[0m"


def test_a_terminal_shows_short_lines_and_no_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    log.logger.handlers.clear()
    log.init_logger()
    log.logger.info("no file has this line")
    log.add_file(path := tmp_path / "a.log")
    log.logger.info("a detail")
    log.logger.info("step:  1  loss:  5.0000", extra=on_screen("step 1  loss 5"))
    log.logger.info("Training completed", extra=on_screen())
    log.logger.warning("too hot")
    log.add_file(None)
    shown = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in terminal.getvalue().splitlines()]
    assert shown == [
        "no file has this line", "step 1  loss 5", "Training completed", "WARNING too hot"
    ]  # fmt: skip
    full = [line.partition(" - INFO - ")[2] for line in path.read_text().splitlines()[:3]]
    assert full == ["a detail", "step:  1  loss:  5.0000", "Training completed"]


def test_a_step_takes_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    log.logger.handlers.clear()
    log.init_logger()
    row = {"step": 1_234_567, "loss": 2.34567, "grad_norm": 0.5234, "tps": 123_456.7, "mfu": 45.67}
    progress = Progress(12.3, timedelta(days=23, hours=12))
    Console(colors=False).show_step(row, MemoryReading(123.4567, 99.99, {}), progress)
    (line,) = terminal.getvalue().splitlines()
    assert len(line) <= 100
    assert line[9:] == (
        "step 1234567  loss 2.3457  grad_norm 0.523  123.5 GiB  123,457 tps  mfu 46%  eta 23.5 days"
    )


def test_debug_lines_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.init_logger()
    log.logger.debug("detail")
    assert capsys.readouterr().out == "" and log.logger.level == logging.INFO
