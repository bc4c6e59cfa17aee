"""A switch file requests an action once; the kill switch requests it while the file exists."""

from pathlib import Path

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience.agreement import Request, Switches


def test_a_switch_file_requests_once_and_is_removed(tmp_path: Path) -> None:
    switches = Switches(tmp_path, Resilience())
    assert switches.read() == []
    for name in ("SAVE", "EXPORT", "save.txt"):
        (tmp_path / name).touch()
    assert switches.read() == [Request.SAVE, Request.EXPORT]
    assert [path.name for path in tmp_path.iterdir()] == ["save.txt"]
    assert switches.read() == []


def test_the_kill_switch_is_not_removed(tmp_path: Path) -> None:
    switches = Switches(tmp_path, Resilience())
    (tmp_path / "KILL").touch()
    assert switches.read() == switches.read() == [Request.KILL]
    assert (tmp_path / "KILL").exists()


def test_switches_may_be_in_another_folder(tmp_path: Path) -> None:
    """Several runs can share one switch file."""
    switches = Switches(
        tmp_path / "run",
        Resilience(kill_switch_path=str(tmp_path / "all"), save_switch_path="../save-shared"),
    )
    for name in ("all", "save-shared", "KILL", "SAVE"):
        (tmp_path / name).touch()
    (tmp_path / "run").mkdir()
    assert switches.read() == [Request.KILL, Request.SAVE]


def test_an_unreadable_folder_contains_no_requests(tmp_path: Path) -> None:
    assert Switches(tmp_path / "missing", Resilience()).read() == []
