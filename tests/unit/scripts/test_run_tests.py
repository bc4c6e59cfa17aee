"""run_tests.sh --quick selects unit tests of changed folders."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.runner import ROOT

FUNCTION = re.search(
    r"^changed_unit_tests\(\) \{\n.*?^\}$",
    (ROOT / "run_tests.sh").read_text(),
    re.MULTILINE | re.DOTALL,
)


def bash(folder: Path, script: str) -> list[str]:
    identity = (
        "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b"
    )
    command = ["bash", "-euc", f"{identity}\n{script}"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def selected_tests(folder: Path) -> list[str]:
    assert FUNCTION is not None
    return bash(folder, f"{FUNCTION[0]}\nchanged_unit_tests")


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("torchtitan_like/optim/loss.py", ["optim"]),
        ("torchtitan_like/data/text/formats.py", ["data"]),
        ("torchtitan_like/report/runs.py", ["cli"]),
        ("torchtitan_like/train_configs/debug_model.toml", ["config"]),
        ("torchtitan_like/run.py", ["test_run.py"]),
        ("torchtitan_like/process_start.py", ["test_process_start.py"]),
        ("torchtitan_like/train.py", ["test_run.py"]),
        ("tests/unit/test_torchrun.py", ["test_torchrun.py"]),
        ("tests/unit/cli/test_run.py", ["cli"]),
        ("run_train.sh", ["launcher"]),
        ("run_tests.sh", ["scripts"]),
        ("scripts/pp_bubble.py", ["scripts"]),
        *(
            (file, ["cli/test_document.py", "config/test_document.py", "test_site.py"])
            for file in ("docs/reference/cli.md", "README.md", "mkdocs.yml")
        ),
        ("tests/unit/test_house.py", []),
        (".gitignore", []),
    ],
)
def test_quick_tests_of_each_file(changed: str, tests: list[str], tmp_path: Path) -> None:
    selected = [f"tests/unit/{name}" for name in [*tests, "test_house.py"]]
    for path in (changed, *selected):
        assert (ROOT / path).exists()
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch() if "." in path else (tmp_path / path).mkdir(exist_ok=True)
    bash(tmp_path, "git init -q . && git add . && git commit -qm one")
    (tmp_path / changed).write_text("changed")
    assert selected_tests(tmp_path) == selected


def test_quick_tests_cover_the_changed_folders(tmp_path: Path) -> None:
    house = "tests/unit/test_house.py"
    for folder in ("torchtitan_like/optim", "torchtitan_like/data/text", "scripts", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").touch()
    for folder in ("optim", "data", "scripts"):
        (tmp_path / "tests/unit" / folder).mkdir(parents=True)
    bash(tmp_path, "git init -q . && git add . && git commit -qm one")
    (tmp_path / "torchtitan_like/data/text/file.py").write_text("changed")
    (tmp_path / "docs/file.py").write_text("changed")
    assert selected_tests(tmp_path) == ["tests/unit/data", house]
    (tmp_path / "torchtitan_like/optim/new.py").touch()  # an untracked file
    assert selected_tests(tmp_path) == ["tests/unit/data", "tests/unit/optim", house]
    bash(tmp_path, "git add . && git commit -qm two")
    # Without uncommitted changes, the last commit counts.
    assert selected_tests(tmp_path) == ["tests/unit/data", "tests/unit/optim", house]
    (tmp_path / "scripts/file.py").write_text("changed")
    assert selected_tests(tmp_path) == ["tests/unit/scripts", house]
