"""The version names the commit of the package's files."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from torchtitan_like import __version__
from torchtitan_like.util import version


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a package in a git checkout with one commit."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("old = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "v1")  # must not replace the hash
    return package


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_has_its_commit_and_whether_files_changed(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert version.commit(checkout) == head
    (checkout / "code.py").write_text("new = 1\n")
    assert version.commit(checkout) == f"{head}+changes"


def test_the_record_of_a_build_counts_first(checkout: Path) -> None:
    (checkout / version.RECORD).write_text("abc123\n")
    assert version.commit(checkout) == version.recorded_commit(checkout) == "abc123"


def test_an_installed_package_in_another_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout.parent / "venv"
    installed.mkdir()
    assert version.commit(installed) is None and version.recorded_commit(installed) is None


def test_missing_facts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "commit", lambda: None)
    monkeypatch.setattr(metadata, "version", missing)
    expected = f"torchtitan_like {__version__} (commit unknown, torch not installed)"
    assert version.describe_version() == expected
