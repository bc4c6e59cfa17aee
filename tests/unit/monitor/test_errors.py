"""What a rank leaves when an error ends it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchtitan_like.monitor.errors import errors_of, in_words, record_error


def fail(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_it_says_who_where_when_and_why(tmp_path: Path) -> None:
    record = record_error(tmp_path, 3, "save", 12, fail("too small"))
    assert errors_of(tmp_path) == [record]
    first, *traceback = in_words(record).splitlines()
    assert f"host {socket.gethostname()}, rank 3, step 12, phase save:" in first
    assert traceback[0] == "Traceback (most recent call last):" and "in fail" in traceback[1]
    assert traceback[-1] == "ValueError: too small"


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "errors").write_text("in the way")
    record = record_error(tmp_path, 0, "step", 1, fail("too small"))
    assert "ValueError: too small" in in_words(record)
    assert "could not be recorded" in caplog.text and errors_of(tmp_path) == []
