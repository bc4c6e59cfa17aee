"""The version of this program: its release, and the git commit of its files.

Nothing here imports torch. setup.py records the commit in wheels and source distributions.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from torchtitan_like import __version__
from torchtitan_like.util.git import git_output, has_tracked_files

PACKAGE = Path(__file__).resolve().parents[1]
RECORD = "COMMIT"
# The commit's hash, followed by "+changes" if tracked files differ from it. setup.py has the same.
DESCRIBE = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")


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
