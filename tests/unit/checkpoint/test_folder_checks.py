"""A folder is checked for free space and write access, and that all ranks see it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.saving import (
    check_space,
    check_writable,
    wait_until_visible,
)

GIB = 2**30


def disk(monkeypatch: pytest.MonkeyPatch, **changes: int) -> list[Path]:
    """Simulate a file system with 10 GiB and 100 files free for the user, and more for root.

    Returns a list that collects the queried folders.
    """
    queried: list[Path] = []
    status = {"f_bavail": 10 * 2**18, "f_bfree": 20 * 2**18, "f_frsize": 4096, "f_bsize": 2**20, "f_files": 1000,
             "f_favail": 100, "f_ffree": 200}  # fmt: skip

    def statvfs(path: Path) -> Any:
        queried.append(path)
        return SimpleNamespace(**status | changes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return queried


@pytest.mark.parametrize(
    ("needed", "files", "message"),
    [
        (9 * GIB, 100, None),
        (10 * GIB, 1, "has 10.00 GiB free. Expected 10.26 GiB for a checkpoint"),  # with the margin
        (GIB, 101, "room for 100 more files .inodes.. Expected 101 for a checkpoint"),
    ],
)
def test_too_little_free_space_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int, files: int, message: str | None
) -> None:
    queried = disk(monkeypatch)
    if message is None:
        check_space(tmp_path / "not" / "yet", needed, files)
    else:
        with pytest.raises(CheckpointError, match=message):
            check_space(tmp_path / "not" / "yet", needed, files)
    assert queried == [tmp_path]


def test_a_file_system_without_file_counts_accepts_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, f_files=0, f_favail=0)
    check_space(tmp_path, GIB, 10**9)


def test_free_space_is_read_from_the_real_disk(
    tmp_path: Path,
) -> None:
    check_space(tmp_path, 1, 1)
    with pytest.raises(CheckpointError, match="lower checkpoint.keep_latest_k"):
        check_space(tmp_path, 2**62)


def test_a_writable_folder_is_accepted_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="No checkpoint can be written to .*file/below"):
        check_writable(tmp_path / "file" / "below")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        check_writable(tmp_path)


def test_a_file_system_that_returns_wrong_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: bytes(16))
    with pytest.raises(
        CheckpointError, match="its file system is faulty.*Choose another job.dump_folder"
    ):
        check_writable(tmp_path)


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    waits: list[float] = []
    with pytest.raises(
        CheckpointError,
        match="within 3 s. Expected a file system that all nodes share. Set job.dump_folder",
    ):
        wait_until_visible(tmp_path / "new", patience=3, sleep=waits.append)
    assert sum(waits) == pytest.approx(3, abs=0.2)


def test_a_rank_waits_for_a_folder_that_appears_late(tmp_path: Path) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / "hidden").rename(tmp_path / "visible")

    (tmp_path / "hidden").mkdir()
    wait_until_visible(tmp_path / "visible", sleep=sleep)
    assert len(waits) == 3
