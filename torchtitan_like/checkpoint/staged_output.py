"""Publish a folder or file under its name only when it is complete, with one writer at a time.

Every command that writes an export or a converted checkpoint uses `StagedOutput`.
The trainer holds `run.lock` for its whole folder instead.
"""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from torchtitan_like.checkpoint.step_folders import Manifest, write_manifest
from torchtitan_like.util.files import publish
from torchtitan_like.util.locks import FileLock

STAGED = ".partial-"  # followed by eight random hexadecimal digits


class StagedOutput:
    """An output that becomes visible as `final` when it is complete.

    Use it in a `with` block, in one process. Entering takes `<final>.lock` and removes the stages
    of killed processes. Leaving removes an unpublished stage and the lock. Raises LockedError if
    another process writes the same output.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.with_name(f"{final.name}{STAGED}{uuid.uuid4().hex[:8]}")
        self._lock = FileLock(
            final.with_name(f"{final.name}.lock"),
            subject=str(final),
            holder="process",
            remedy="Wait until it ends, or choose another name",
        )

    def __enter__(self) -> StagedOutput:
        self._lock.acquire()
        try:
            pattern = re.compile(rf"{re.escape(self.final.name)}{re.escape(STAGED)}[0-9a-f]{{8}}")
            for path in self.final.parent.iterdir():
                if pattern.fullmatch(path.name):
                    _remove(path)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _remove(self.path)
        finally:
            self._lock.release()

    def publish(self, manifest: Manifest | None = None) -> None:
        """Write the manifest, if given, and rename the staged output to its final name.

        All other files must be written and verified. Raises LockLostError if this process has
        lost the lock, and FileExistsError if another program has created the output.
        """
        self._lock.check()
        if manifest is not None:
            write_manifest(self.path, manifest)
        publish(self.path, self.final)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
