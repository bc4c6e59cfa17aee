"""Names and readers of the run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.util import run_directory
from torchtitan_like.util.files import StorageError
from torchtitan_like.util.run_directory import LAUNCHER_FOLDER, RunEnd


@pytest.mark.parametrize("end", [RunEnd("requeue", 75, 12), RunEnd("bad_data", 65, None)])
def test_exit_json_round_trips_and_its_folder_is_created(end: RunEnd, tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    run_directory.write_exit(run, end)
    assert run_directory.read_exit(run) == end
    assert json.loads((run / "exit.json").read_text()) == end._asdict()


def test_a_missing_exit_differs_from_a_malformed_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_directory.read_exit(tmp_path)
    for text in ('{"reason": "done"}', "[]", "{"):
        (tmp_path / "exit.json").write_text(text)
        with pytest.raises(ValueError):
            run_directory.read_exit(tmp_path)


def test_exit_json_for_the_launcher_of_an_unwritable_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = RunEnd("storage", 74, 3)
    monkeypatch.setenv(LAUNCHER_FOLDER, str(tmp_path / "launcher"))
    run_directory.write_exit_for_launcher(end)
    assert run_directory.read_exit(tmp_path / "launcher") == end
    message = "storage \\(code 74\\), and exit.json could not be written anywhere"
    (tmp_path / "file").touch()
    monkeypatch.setenv(LAUNCHER_FOLDER, str(tmp_path / "file"))
    with pytest.raises(StorageError, match=message):
        run_directory.write_exit_for_launcher(end)
    monkeypatch.delenv(LAUNCHER_FOLDER)
    with pytest.raises(StorageError, match=message):
        run_directory.write_exit_for_launcher(end)


def test_attempts_are_listed_by_number_without_attempt_0(tmp_path: Path) -> None:
    assert run_directory.numbered_attempts(tmp_path) == []
    assert run_directory.newest_attempt(tmp_path) is None
    for name in ("10", "0", "9", "1", "notes", "1.old"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    names = [folder.name for folder in run_directory.numbered_attempts(tmp_path)]
    assert names == ["1", "9", "10"]
    assert run_directory.newest_attempt(tmp_path) == run_directory.attempt_folder(tmp_path, 10)


def test_truncated_heartbeats_are_ignored(tmp_path: Path) -> None:
    assert run_directory.read_heartbeats(tmp_path) == {}
    (tmp_path / "heartbeat").mkdir()
    for rank, text in ((10, '{"step": 4}'), (2, '{"step": 5}'), (3, '{"ste'), (4, "[]")):
        run_directory.heartbeat_file(tmp_path, rank).write_text(text)
    assert list(run_directory.read_heartbeats(tmp_path).items()) == [
        (2, {"step": 5}),
        (10, {"step": 4}),
    ]


def test_switch_files_may_be_outside_the_run(tmp_path: Path) -> None:
    run, shared_switch = tmp_path / "run", tmp_path / "KILL_ALL"
    switches = run_directory.switch_paths(run, str(shared_switch), "SAVE")
    assert switches == (shared_switch, run / "SAVE", run / "EXPORT")


def test_read_config_returns_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nsteps = 7\n")
    assert run_directory.read_config(tmp_path)["training"]["steps"] == 7


def test_readers_import_neither_torch_nor_the_schema() -> None:
    code = """
import sys
from torchtitan_like.util import exit_codes, jsonl, run_directory
loaded = sorted({"torch", "numpy", "pydantic"} & sys.modules.keys())
internal = sorted(m for m in sys.modules if m.startswith("torchtitan_like.") and ".util" not in m)
assert not loaded and not internal, (loaded, internal)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
