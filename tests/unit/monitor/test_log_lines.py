"""Log lines have TorchTitan's format, appear once, and are colored only on terminals."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_like.monitor import log


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
    log.logger.info(log.paint("loss: 1.0", "green", True))
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


def test_debug_lines_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.init_logger()
    log.logger.debug("detail")
    assert capsys.readouterr().out == "" and log.logger.level == logging.INFO
