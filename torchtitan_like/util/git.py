"""Read the state of a git checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TIMEOUT_S = 10.0


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
            timeout=TIMEOUT_S,
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
