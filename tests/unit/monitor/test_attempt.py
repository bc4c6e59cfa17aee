"""An attempt writes its configuration, environment and events."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from torchtitan_like.monitor.attempt import Attempt
from torchtitan_like.util import run_directory
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.run_directory import RunEnd


@pytest.mark.parametrize(
    ("existing", "expected"),
    [([], 1), (["1"], 2), (["1", "2", "10"], 11), (["2"], 3), (["notes", "1.old"], 1)],
)
def test_an_attempt_takes_the_next_number(
    existing: list[str], expected: int, tmp_path: Path
) -> None:
    for name in existing:
        (tmp_path / "attempts" / name).mkdir(parents=True)
    run = Attempt(tmp_path)
    assert run.number == expected and run.folder.is_dir()


def test_simultaneous_starts_get_different_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both starts list the attempts before either of them makes its folder."""
    Attempt(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "newest_attempt", lambda _: None)
        assert Attempt(tmp_path).number == 2


def test_other_ranks_create_no_files(tmp_path: Path) -> None:
    other = Attempt(tmp_path / "run", number=4)
    assert not (tmp_path / "run").exists()
    assert other.folder == tmp_path / "run" / "attempts" / "4"
    assert run_directory.log_file(other.folder, 3) == other.folder / "logs" / "rank3.log"


def test_each_attempt_and_the_run_folder_have_a_config(tmp_path: Path) -> None:
    for text in ("[job]\n", "[job]\ndescription = 'é'\n"):
        Attempt(tmp_path).write_config(text)
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == "[job]\ndescription = 'é'\n"
    assert (tmp_path / "attempts" / "1" / "config.toml").read_text(encoding="utf-8") == "[job]\n"
    assert (tmp_path / "attempts" / "2" / "config.toml").read_text(
        encoding="utf-8"
    ) == "[job]\ndescription = 'é'\n"


def test_unfinished_files_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    killed = Attempt(tmp_path)
    errors = run_directory.error_file(killed.folder, 0)
    starts = run_directory.error_file(run_directory.attempt_folder(tmp_path, 0), 0)
    paths = [tmp_path / "exit.json", killed.folder / "config.toml", errors, starts]
    unfinished = [path.with_name(f"{path.name}.tmp-77") for path in paths]
    staged = tmp_path / "step-5.tmp-12ab"
    staged.mkdir()
    for path in (errors, *unfinished):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    Attempt(tmp_path)
    assert not any(path.exists() for path in unfinished) and errors.exists() and staged.exists()


def test_exit_json_is_written_and_removed(tmp_path: Path) -> None:
    run = Attempt(tmp_path)
    run.remove_exit()
    run_directory.write_exit(tmp_path, RunEnd("completed", 0, 200))
    assert json.loads((tmp_path / "exit.json").read_text()) == {
        "reason": "completed",
        "code": 0,
        "step": 200,
    }
    run.remove_exit()
    assert not (tmp_path / "exit.json").exists()


@pytest.mark.parametrize("torn", [b"", b'{"event": "sa'])
def test_events_are_appended_even_after_half_a_line(torn: bytes, tmp_path: Path) -> None:
    first = Attempt(tmp_path, wall_clock=lambda: 12.5)
    first.event("save", step=10)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(torn)
    Attempt(tmp_path, wall_clock=lambda: 13.0).event("stop", step=11, loss=float("nan"))
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert json.loads(lines[0]) == {"event": "save", "time": 12.5, "attempt": 1, "step": 10}
    assert json.loads(lines[-1]) == {
        "event": "stop",
        "time": 13.0,
        "attempt": 2,
        "step": 11,
        "loss": "nan",
    }
    assert len(lines) == (3 if torn else 2)


def test_environment_is_captured_in_a_thread(tmp_path: Path) -> None:
    run = Attempt(tmp_path)
    run.capture_environment().join()
    assert {path.name for path in (run.folder / "environment").iterdir()} >= {
        "variables.txt",
        "packages.txt",
        "facts.json",
        "git.txt",
    }


def test_a_failed_capture_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Path) -> None:
        raise ValueError("no")

    monkeypatch.setattr("torchtitan_like.monitor.attempt.write_environment", broken)
    Attempt(tmp_path).capture_environment().join()
    assert "could not be recorded" in caplog.text and "ValueError" in caplog.text


def test_a_full_disk_during_the_capture_counts_as_a_write_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "variables.txt"))

    monkeypatch.setattr("torchtitan_like.monitor.attempt.write_environment", full)
    failures = WriteFailures()
    Attempt(tmp_path, failures=failures).capture_environment().join()
    assert failures.stop_is_due()
