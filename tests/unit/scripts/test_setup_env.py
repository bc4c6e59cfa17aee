"""scripts/setup_env.sh with fake interpreters: selected Python, installed packages, errors."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# A fake Python. Files next to it state its packages: `has-packages` (all) or `has-torch` (only
# torch). `-m venv DIR` copies it. `-m pip install` logs its arguments, and creates `has-packages`
# when it installs the project itself.
FAKE_PYTHON = """#!/usr/bin/env bash
folder=$(cd "$(dirname "$0")" && pwd)
case "$*" in
  *check_requirements.py*)
    [ ! -e "$folder/has-packages" ] || exit 0
    echo "numpy: not installed, expected >=1.26"
    [ -e "$folder/has-torch" ] || echo "torch: ${FOUND_TORCH:-not installed}, expected >=2.11"
    exit 1 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip --version") exit 0 ;;
  "-m pip install"*)
    echo "$*" >>"$folder/pip.log"
    [ -z "${PIP_FAILS:-}" ] || { echo "ERROR: No matching distribution" >&2; exit 1; }
    sleep 0.2
    [[ "$*" != *" -e "* ]] || touch "$folder/has-packages" ;;
  *version_info*) [ ! -e "$folder/is-old" ] ;;
  --version) echo "Python 3.8.18" ;;
  *) exec REAL "$@" ;;
esac
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The files that the script needs, and `bin/python3`, which has no packages."""
    repo = tmp_path / "a repo"  # with a blank, as in paths of users
    (repo / "scripts").mkdir(parents=True)
    for name in ("scripts/setup_env.sh", "scripts/check_requirements.py", "pyproject.toml"):
        shutil.copy(ROOT / name, repo / name)
    make_python(repo / "bin" / "python3")
    return repo


def make_python(path: Path, *marks: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    path.chmod(0o755)
    for mark in marks:
        (path.parent / mark).touch()
    return path


def start(repo: Path, extra: str = "", **variables: str) -> subprocess.Popen[str]:
    """Call `setup_env` as run_train.sh does. It prints the selected Python."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    env["PATH"] = f"{repo / 'bin'}{os.pathsep}{env['PATH']}"
    code = f'set -euo pipefail; source scripts/setup_env.sh; setup_env {extra} || exit 1; echo "$PYTHON"'
    return subprocess.Popen(
        ["bash", "-c", code, "./run_train.sh"],
        cwd=repo,
        env={**env, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def setup(repo: Path, extra: str = "", **variables: str) -> tuple[int, str, str]:
    process = start(repo, extra, **variables)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.strip(), stderr


def installed(repo: Path) -> list[str]:
    log = repo / ".venv" / "bin" / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


def test_a_complete_python_is_used_unchanged(repo: Path) -> None:
    (repo / "bin" / "has-packages").touch()
    assert setup(repo) == (0, str(repo / "bin" / "python3"), "")
    assert not (repo / ".venv").exists()


@pytest.mark.parametrize("given_path", ["own/python", "./own/python"])
def test_a_given_python_takes_precedence_with_an_absolute_path(repo: Path, given_path: str) -> None:
    (repo / "bin" / "has-packages").touch()
    expected = make_python(repo / "own" / "python", "has-packages")
    code, python, _ = setup(repo, PYTHON=given_path)
    assert code == 0 and os.path.samefile(python, expected) and os.path.isabs(python)


def test_a_complete_venv_is_used_unchanged(repo: Path) -> None:
    venv = make_python(repo / ".venv" / "bin" / "python", "has-packages")
    assert setup(repo) == (0, str(venv), "")
    assert installed(repo) == []


def test_missing_packages_of_a_given_python_are_reported(repo: Path) -> None:
    make_python(repo / ".venv" / "bin" / "python", "has-packages")
    _, _, stderr = setup(repo, PYTHON="bin/python3")
    lines = [line.strip() for line in stderr.splitlines()]
    assert lines[:3] == [
        "PYTHON=bin/python3 does not meet pyproject.toml:",
        "numpy: not installed, expected >=1.26",
        "torch: not installed, expected >=2.11",
    ]
    assert f"Using {repo}/.venv/bin/python instead." in lines[3]


@pytest.mark.parametrize(
    ("extra", "target"),
    [
        ("", ""),
        ("dev", "[dev]"),
        ("'dev interop'", "[dev,interop]"),
        ("'' report", "[report]"),
        ("dev 'report plot'", "[dev,report,plot]"),
    ],
)
def test_a_venv_is_made_once_and_installs_the_tested_torch_first(
    repo: Path, extra: str, target: str
) -> None:
    code, python, stderr = setup(repo, extra)
    assert (code, python) == (0, str(repo / ".venv" / "bin" / "python"))
    assert "torch: not installed, expected >=2.11" in stderr and "Installing into" in stderr
    torch, project = installed(repo)
    assert torch.endswith("torch==2.13.0")
    assert project.endswith(f"-e {repo}{target}")
    assert setup(repo, extra) == (0, python, "")
    assert len(installed(repo)) == 2


def test_an_interpreter_without_the_optional_extras_is_used(repo: Path) -> None:
    """Nothing is installed for a page only. The fake Python lacks what it is asked for by name."""
    python = make_python(repo / "bin" / "python3", "has-packages")
    text = python.read_text().replace('[ ! -e "$folder/has-packages" ]', '[[ "$*" == *report* ]]')
    python.write_text(text)
    assert setup(repo, "'' report") == (0, str(python), "")
    assert not (repo / ".venv").exists()


def test_an_old_torch_is_replaced_by_the_tested_version(repo: Path) -> None:
    """pip would choose the newest release, which may be a build of several gigabytes."""
    make_python(repo / ".venv" / "bin" / "python")
    assert setup(repo, FOUND_TORCH="found 2.10.0")[0] == 0
    torch, _ = installed(repo)
    assert torch.endswith("torch==2.13.0")


def test_an_installed_torch_is_kept(repo: Path) -> None:
    make_python(repo / ".venv" / "bin" / "python", "has-torch")
    assert setup(repo)[0] == 0
    [project] = installed(repo)
    assert project.endswith(f"-e {repo}")


def test_a_failed_installation_prints_a_remedy_and_can_be_retried(repo: Path) -> None:
    code, python, stderr = setup(repo, "dev", PIP_FAILS="1")
    assert (code, python) == (1, "")
    for advice in (
        "ERROR: No matching distribution",
        "try again",
        "PYTHON=/path/to/python",
        "PIP_INDEX_URL",
        "rm -rf",
    ):
        assert advice in stderr
    assert "check_requirements.py dev" in stderr
    assert setup(repo, "dev")[0] == 0


def test_an_old_python_is_refused_with_a_remedy(repo: Path) -> None:
    (repo / "bin" / "is-old").touch()
    code, _, stderr = setup(repo)
    assert code == 1
    assert "needs Python 3.10 or newer, but 'python3' is Python 3.8.18" in stderr
    assert "PYTHON=python3.12" in stderr
    assert not (repo / ".venv").exists()


def test_a_missing_python_is_refused(repo: Path) -> None:
    code, _, stderr = setup(repo, PYTHON="no-such-python")
    assert code == 1
    assert "no-such-python" in stderr


def test_two_scripts_at_the_same_time_install_once(repo: Path) -> None:
    processes = [start(repo), start(repo)]
    ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(installed(repo)) == 2, ends
