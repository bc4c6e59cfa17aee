"""The version of this program: its release, and the git commit of its files.

Nothing here imports torch. setup.py records the commit in wheels and source distributions.
"""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

from torchtitan_like import __version__

PACKAGE = Path(__file__).resolve().parents[1]
RECORD = "COMMIT"
# The commit's hash, followed by "+changes" if tracked files differ from it. setup.py has the same.
DESCRIBE = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


GIT_TIMEOUT_S = 10.0


def git_output(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails, is not installed, or does not finish in time."""
    command = ["git", "-C", str(folder), *arguments]
    # Read only: git must not refresh the index while the user's own git command runs.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def has_tracked_files(folder: Path) -> bool:
    """Return True if git tracks files of `folder`.

    A virtual environment inside another project's checkout is not tracked there.
    """
    return bool(git_output(folder, "ls-files", "--", "."))


def recorded_commit(package: Path = PACKAGE) -> str | None:
    """Return the commit that a wheel was built from; None in a checkout."""
    try:
        return (package / RECORD).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def commit(package: Path = PACKAGE) -> str | None:
    """Return the commit of the package's files; None if neither a record nor git has it."""
    recorded = recorded_commit(package)
    if recorded is not None:
        return recorded
    if not has_tracked_files(package):
        return None
    return (git_output(package, *DESCRIBE) or "").strip() or None


def torch_version() -> str | None:
    """Return the version of the installed torch, such as "2.13.0+cpu"; None without torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def describe_version() -> str:
    """Return one line with the release, the commit, and the version of torch."""
    return (
        f"torchtitan_like {__version__} (commit {commit() or 'unknown'}, "
        f"torch {torch_version() or 'not installed'})"
    )
