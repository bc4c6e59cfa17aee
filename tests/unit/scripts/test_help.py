"""Every script of Python explains itself. (Those of bash: test_slurm_scripts.py, and where each is tested.)"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

FILES = sorted([*ROOT.glob("scripts/**/*.py"), ROOT / "benchmarks/scaling.py"])
DEPRECATED = ("checkpoint.py", "download_assets.py", "export.py", "generate.py")  # tests/unit/cli/test_deprecated.py
SCRIPTS = [
    path for path in FILES if '__name__ == "__main__"' in path.read_text() and path.name not in DEPRECATED
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_explains_itself_and_does_nothing_else(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    told = capsys.readouterr()
    assert ended.value.code in (None, 0), told.err
    is_typed = script.name not in STARTED_BY_SCRIPTS
    if is_typed and re.search(r"^from (torchtitan_like|scripts)\b", script.read_text(), re.MULTILINE):
        assert str(ROOT) in sys.path, "the package need not be installed"
    assert len(told.out.splitlines()) > 5 and not list(tmp_path.iterdir())


PATH_LINE = (
    "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
    "  # the package need not be installed\n"
)
OF_REPOSITORY = re.compile(r"^from (torchtitan_like|scripts|benchmarks)\b", re.MULTILINE)
STARTED_BY_SCRIPTS = ("job.py",)  # with PYTHONPATH set


def test_all_scripts_find_the_package_in_the_same_way() -> None:
    """One line before the first import of the repository, and no other change of sys.path there."""
    wrong = []
    for path in [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("benchmarks/*.py")]:
        text = path.read_text()
        first_import = OF_REPOSITORY.search(text)
        if (
            '__name__ == "__main__"' in text
            and path.name not in STARTED_BY_SCRIPTS
            and first_import is not None
            and PATH_LINE not in text[: first_import.start()]
        ):
            wrong.append(f"{path.name}: the line is missing before its first import")
        others = re.findall(r"^sys\.path\..*\n", text, re.MULTILINE)
        wrong += [f"{path.name}: {line}" for line in others if line != PATH_LINE]
    assert wrong == []
