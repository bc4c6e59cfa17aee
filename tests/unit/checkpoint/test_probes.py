"""Is there room, can it be written, do all ranks see it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.probes import (
    check_space,
    check_writable,
    remove_marker,
    wait_for_marker,
    write_marker,
)

GIB = 2**30


def disk(monkeypatch: pytest.MonkeyPatch, **changes: int) -> list[Path]:
    """A file system with 10 GiB and 100 files left for the user, more for root; the folders asked for."""
    asked: list[Path] = []
    found = {"f_bavail": 10 * 2**18, "f_bfree": 20 * 2**18, "f_frsize": 4096, "f_bsize": 2**20, "f_files": 1000,
             "f_favail": 100, "f_ffree": 200}  # fmt: skip

    def statvfs(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(**found | changes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return asked


@pytest.mark.parametrize(
    ("needed", "files", "words"),
    [
        (9 * GIB, 100, None),
        (10 * GIB, 1, "has 10.00 GiB free, a checkpoint needs 10.26 GiB"),  # with the margin
        (GIB, 101, "room for 100 more files .inodes., a checkpoint needs 101"),
    ],
)
def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int, files: int, words: str | None) -> None:
    asked = disk(monkeypatch)
    if words is None:
        check_space(tmp_path / "not" / "yet", needed, files)
    else:
        with pytest.raises(CheckpointError, match=words):
            check_space(tmp_path / "not" / "yet", needed, files)
    assert asked == [tmp_path]


def test_a_file_system_that_does_not_count_files_has_room_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, f_files=0, f_favail=0)
    check_space(tmp_path, GIB, 10**9)


def test_the_disk_of_this_machine_has_room_for_a_little_but_not_for_everything(tmp_path: Path) -> None:
    check_space(tmp_path, 1, 1)
    with pytest.raises(CheckpointError, match="lower checkpoint.keep_latest_k"):
        check_space(tmp_path, 2**62)


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="No checkpoint can be written to .*file/below"):
        check_writable(tmp_path / "file" / "below")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        check_writable(tmp_path)


def test_bytes_that_come_back_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: bytes(16))
    with pytest.raises(CheckpointError, match="its file system is faulty.*Choose another job.dump_folder"):
        check_writable(tmp_path)


def test_every_rank_sees_the_marker(tmp_path: Path) -> None:
    token = write_marker(tmp_path / "shared")
    wait_for_marker(tmp_path / "shared", token)
    remove_marker(tmp_path / "shared")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("stale", [False, True])
def test_a_folder_of_the_same_name_on_another_disk(tmp_path: Path, stale: bool) -> None:
    waits: list[float] = []
    if stale:
        write_marker(tmp_path)
    with pytest.raises(CheckpointError, match="within 3 s. Expected a file system that all nodes share. Set job.dump_folder"):
        wait_for_marker(tmp_path, "token", patience=3, sleep=waits.append)
    assert sum(waits) == pytest.approx(3, abs=0.2)


def test_a_marker_that_appears_late_is_seen(tmp_path: Path) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / "there").rename(tmp_path / "here")

    token = write_marker(tmp_path / "there")
    wait_for_marker(tmp_path / "here", token, sleep=sleep)
    assert len(waits) == 3
