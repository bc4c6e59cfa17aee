"""Every Python script prints its help. Bash scripts have separate tests."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

FILES = sorted([*ROOT.glob("scripts/**/*.py"), ROOT / "benchmarks/scaling.py"])
SCRIPTS = [path for path in FILES if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_is_printed_without_side_effects(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code in (None, 0), printed.err
    assert len(printed.out.splitlines()) > 5 and not list(tmp_path.iterdir())


def test_no_file_changes_the_module_search_path() -> None:
    """Scripts need the installed package. Benchmarks run as `python -m benchmarks.NAME`."""
    change = re.compile(r"sys\.path(\.(insert|append|extend)|\[.*\] *=|\[.*\], .*=)")
    folders = ("scripts", "benchmarks", "torchtitan_like", "tests")
    files = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    changing = {
        path.relative_to(ROOT).as_posix() for path in files if change.search(path.read_text())
    }
    assert changing == {
        "torchtitan_like/util/modules.py",  # `searching_modules_in`, for modules that users name
        "tests/harness/rank_pool.py",  # ranks have the search path of the test
    }


def test_no_script_imports_a_script() -> None:
    imports = re.compile(r"^\s*(from|import) scripts\b", re.MULTILINE)
    files = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("torchtitan_like/**/*.py")]
    assert [path.name for path in files if imports.search(path.read_text())] == []
