"""The folder that a server shows: it reads and writes nothing outside of it, also through links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from torchtitan_like.util.run_directory import ATTEMPTS, CONFIG, EXIT, MANIFEST

ATTEMPT_DEPTH = 3  # of the files below attempts/


class Boundary:
    """A folder that contains everything that may be read."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve(strict=True)

    def require(self, path: Path) -> None:
        """Raise ValueError if `path` leads out of the folder, or to a device or a pipe.

        A path without a file is accepted.
        """
        try:
            target = path.resolve()
            mode = target.stat().st_mode if target.exists() else stat.S_IFREG
        except (OSError, RuntimeError) as error:  # a circle of links
            raise ValueError(
                f"{path} cannot be resolved: {error}. Expected a file. Repair the link."
            ) from error
        if not target.is_relative_to(self.root):
            raise ValueError(
                f"{path} leads out of {self.root}. Expected files in the folder that is shown. "
                "Show a folder that contains them, or copy them into the run."
            )
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{path} is a device or a pipe. Expected a file. Remove it.")

    def require_run(self, run: Path) -> None:
        """Raise ValueError if a file that the page of a run reads leads out of the folder."""
        self.require(run)
        for file in (run / CONFIG, run / EXIT, run / ATTEMPTS):
            self.require(file)
        for pattern in ("*.jsonl", f"*/step-*/{MANIFEST}"):
            for file in run.glob(pattern):
                self.require(file)
        for path in _unusual_files(run / ATTEMPTS, ATTEMPT_DEPTH):
            self.require(path)


def _unusual_files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the links, devices and pipes at most `depth` levels below a folder."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        is_folder = entry.is_dir()
        if entry.is_symlink() or not (is_folder or entry.is_file()):
            yield path
        if is_folder and depth > 1:
            yield from _unusual_files(path, depth - 1)
