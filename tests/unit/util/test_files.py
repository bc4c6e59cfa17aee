"""Failed writes: file content, retries, and recorded failures."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchtitan_like.monitor import log
from torchtitan_like.resilience.end import _flush
from torchtitan_like.util import files
from torchtitan_like.util.files import (
    AppendOnlyFile,
    StorageError,
    WriteFailures,
    atomic_file,
    publish,
    storage_error,
    write_atomically,
)
from torchtitan_like.util.jsonl import MAX_UNWRITTEN, JsonlFile, read_rows


class Disk:
    """Replaces FileIO.write: a disk with `free` bytes (None: no limit)."""

    def __init__(self) -> None:
        self.free: int | None = None
        self.error = errno.ENOSPC

    def write(self, file: io.FileIO, data: memoryview) -> int:
        if self.free is not None and len(data) > self.free:
            if not self.free:
                raise OSError(self.error, os.strerror(self.error))
            data = data[: self.free]  # a partial write. The next call fails
        if self.free is not None:
            self.free -= len(data)
        return os.write(file.fileno(), data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()

    class File(io.FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            return disk.write(self, data)

    def open_file(self: AppendOnlyFile) -> io.FileIO:
        if self._file is None:
            self._file = File(self.path, "ab")
        return self._file

    monkeypatch.setattr(AppendOnlyFile, "_open", open_file)
    return disk


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    before, level = list(log.logger.handlers), log.logger.level
    yield
    log.add_file(None)
    log.logger.handlers[:] = before
    log.logger.setLevel(level)


def test_a_record_is_written_completely_or_not_at_all(tmp_path: Path, disk: Disk) -> None:
    file = AppendOnlyFile(tmp_path / "a")
    file.append(b"first\n")
    disk.free = 4
    with pytest.raises(OSError, match="No space"):
        file.append(b"second\n")
    assert file.path.read_bytes() == b"first\n"
    disk.free = None
    file.append(b"third\n")
    assert file.path.read_bytes() == b"first\nthird\n" and file.sync() == 12
    file.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_rows_are_buffered_until_they_can_be_written(
    tmp_path: Path, disk: Disk, error: int
) -> None:
    failures = WriteFailures()
    file = JsonlFile(tmp_path / "metrics.jsonl", failures)
    file.append([{"step": 1}])
    disk.free, disk.error = 5, error
    file.append([{"step": 2}])
    file.append([{"step": 3}])
    assert (file.num_missing, failures.stop_is_due(), file.byte_offset()) == (2, True, 0)
    with pytest.raises(OSError, match="2 rows are missing"):
        file.sync()
    disk.free = None
    file.append([{"step": 4}])
    assert [row["step"] for row in read_rows(file.path)] == [1, 2, 3, 4] and not file.num_missing
    file.close()


def test_close_writes_buffered_rows_and_reports_lost_ones(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    for free, written in ((None, [1]), (0, [])):
        disk.free = 0
        file = JsonlFile(tmp_path / f"{free}.jsonl")
        file.append([{"step": 1}])
        disk.free = free
        file.close()
        assert [row["step"] for row in read_rows(file.path)] == written
    assert "Could not write 1 rows of" in caplog.text


def test_the_number_of_buffered_rows_is_limited(tmp_path: Path, disk: Disk) -> None:
    disk.free = 0
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append({"step": step} for step in range(MAX_UNWRITTEN + 3))
    disk.free = None
    file.append()
    assert read_rows(file.path)[0]["step"] == 3 and file.num_missing == 3, (
        "expected three rows to remain missing"
    )


def test_lost_log_lines_are_counted_in_the_log(tmp_path: Path, disk: Disk) -> None:
    log.init_logger()
    failures = WriteFailures()
    log.add_file(path := tmp_path / "rank0.log", failures)
    log.logger.info("before")
    disk.free = 0
    log.logger.info("lost")
    log.logger.info("lost as well")
    disk.free = None
    log.logger.info("after")
    log.add_file(None)
    lines = path.read_text().splitlines()
    assert [line.rpartition(" - ")[2] for line in lines[::2]] == ["before", "after"]
    assert lines[1] == "(3 lines are missing: they could not be written)", (
        "expected a count that includes the line of the failure"
    )
    assert failures.stop_is_due()


def test_each_file_is_logged_once_and_all_failures_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = WriteFailures(continues=True)
    for path in ("a", "a", "b"):
        with failures.recording(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (
        caplog.text.count("Cannot write a: No space left on device (errno 28). Training continues")
        == 1
    )
    assert failures.summary() == "a: 2, b: 1" and not failures.stop_is_due()


def test_other_errors_are_not_counted() -> None:
    failures = WriteFailures()
    with pytest.raises(ValueError, match="a bug"), failures.recording("a"):
        raise ValueError("a bug")
    assert not failures.stop_is_due()


def test_a_storage_error_names_the_folder() -> None:
    with (
        pytest.raises(StorageError, match="The run folder outputs cannot be written: "),
        storage_error("outputs"),
    ):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [_flush, lambda: (log.init_logger(), log.logger.info("a line"))])
def test_a_failed_write_to_stdout_does_not_end_the_run(
    write: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    stream.flush = full  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(sys, "stdout", stream)
    write()
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of os.fsync and os.replace, with paths relative to the test's folder."""
    recorded: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)
        recorded.append(f"fsync {name}")
        fsync(descriptor)

    def recorded_replace(old: Path, new: Path) -> None:
        recorded.append(f"replace {new.name} by {old.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return recorded


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, calls: list[str]) -> None:
    write_atomically(tmp_path / "a", "ä", tmp_path / "a.new")
    assert (tmp_path / "a").read_bytes() == "ä".encode()
    assert calls == ["fsync a.new", "replace a by a.new", "fsync ."]
    calls.clear()
    write_atomically(tmp_path / "b", b"x", durable=False)
    assert calls == [f"replace b by b.tmp-{os.getpid()}"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "exit.json"
    write_atomically(path, "old")
    with pytest.raises(ValueError, match="half"), atomic_file(path) as file:
        file.write(b"new")
        raise ValueError("half of it")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("present", ["file", "folder", "dangling link"])
def test_a_published_path_is_never_overwritten(tmp_path: Path, present: str) -> None:
    staged, final = tmp_path / "staged", tmp_path / "final"
    staged.mkdir()
    if present == "file":
        final.touch()
    elif present == "folder":
        final.mkdir()  # rename(2) would replace an empty one
    else:
        final.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="never overwritten"):
        publish(staged, final)
    publish(staged, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"final", "new"}


def test_the_folder_above_a_published_path_may_be_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "sync_path", sync)
    staged = tmp_path / "own/staged"
    staged.mkdir(parents=True)
    publish(staged, tmp_path / "own/final")
    assert (tmp_path / "own/final").is_dir()
