"""A rank that ends with an error writes an error record."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan_like.monitor.attempt import record_error
from torchtitan_like.util.run_directory import describe_error, read_errors, read_first_error


def fail(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def broken_driver() -> int:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_record_has_rank_host_time_and_traceback(tmp_path: Path) -> None:
    record = record_error(tmp_path, 3, "save", 12, fail("too small"))
    assert read_errors(tmp_path) == [record]
    first, *traceback = describe_error(record).splitlines()
    assert f"host {socket.gethostname()}, rank 3, step 12, phase save:" in first
    assert traceback[0] == "Traceback (most recent call last):" and "in fail" in traceback[1]
    assert traceback[-1] == "ValueError: too small"


def test_a_record_holds_no_credentials(tmp_path: Path) -> None:
    record_error(tmp_path, 0, "start", 0, fail("https://me:planted@host is not reached"))
    assert "planted" not in (tmp_path / "errors/rank-0.json").read_text()


def test_the_first_error_is_read_without_listing_all_records(tmp_path: Path) -> None:
    """When thousands of ranks end together, none of them should read thousands of files."""
    assert read_first_error(tmp_path) is None
    cause = record_error(tmp_path, 70, "step", 12, fail("cause"))
    record_error(tmp_path, 3, "step", 12, fail("Connection closed by peer"))
    assert read_first_error(tmp_path) == cause
    assert sorted(record["rank"] for record in read_errors(tmp_path)) == [3, 70]


@pytest.mark.parametrize(
    ("device", "location"), [(lambda: 2, "GPU 2, rank 3"), (broken_driver, "rank 3")]
)
def test_the_record_names_the_gpu_if_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Callable[[], int], location: str
) -> None:
    """The logs of the host name GPUs, not ranks."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", device)
    record = record_error(tmp_path, 3, "save", 12, fail("x"))
    assert f"host {socket.gethostname()}, {location}, step 12" in describe_error(record)


def test_an_unwritable_folder_does_not_hide_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "errors").write_text("not a folder")
    record = record_error(tmp_path, 0, "step", 1, fail("too small"))
    assert "ValueError: too small" in describe_error(record)
    assert "could not be recorded" in caplog.text and read_errors(tmp_path) == []
