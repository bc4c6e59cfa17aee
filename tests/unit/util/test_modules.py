"""Import a module by name, or a Python file by path."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from torchtitan_like.util.modules import import_named


def test_a_name_is_imported_as_a_module() -> None:
    assert import_named("math") is math


def test_a_file_is_executed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math.py").write_text("values = []")  # the name of another module
    module = import_named(str(tmp_path / "math.py"))
    monkeypatch.chdir(tmp_path)
    assert import_named("math.py") is module and module.values == [] and sys.modules["math"] is math


def test_a_file_that_raises_is_executed_again(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("raise ValueError('not yet')")
    with pytest.raises(ValueError, match="not yet"):
        import_named(str(file))
    file.write_text("ready = True")
    assert import_named(str(file)).ready


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.py"):
        import_named(str(tmp_path / "absent.py"))
