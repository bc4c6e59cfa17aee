"""Record the git commit in wheels and source distributions. pyproject.toml has all other settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
DESCRIBE = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


def record_commit(package: Path) -> None:
    """Write the commit of this checkout into `package`, where torchtitan_like.util.version reads it.

    An unpacked source distribution is no checkout, and has the record already.
    """
    if not (ROOT / ".git").exists():
        return
    command = ["git", "-C", str(ROOT), *DESCRIBE]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"warning: no commit is recorded: {error}")
        return
    (package / "COMMIT").write_text(commit, encoding="utf-8")


class BuildWithCommit(build_py):
    """Builds the files of a wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(Path(self.build_lib) / "torchtitan_like")


class SourceWithCommit(sdist):
    """Builds a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir) / "torchtitan_like")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit})
