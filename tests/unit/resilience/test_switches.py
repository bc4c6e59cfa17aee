"""A file asks once."""

from torchtitan_like.resilience.requests import Request
from torchtitan_like.resilience.switches import read_switches


def test_a_switch_file_asks_once_and_is_gone(tmp_path):
    assert read_switches(tmp_path) == []
    (tmp_path / "SAVE").touch()
    (tmp_path / "EXPORT").touch()
    (tmp_path / "save.txt").touch()
    assert read_switches(tmp_path) == [Request.SAVE, Request.EXPORT]
    assert [path.name for path in tmp_path.iterdir()] == ["save.txt"]
    assert read_switches(tmp_path) == []


def test_a_folder_that_cannot_be_read_asks_for_nothing(tmp_path):
    assert read_switches(tmp_path / "missing") == []
