"""The checkpoint folder as a list of steps: which are complete, which is newest, which must go.

A step is a directory `step-N` with a `manifest.json`; staged ones are called `step-N.tmp-<id>` and are never read.
Only rank 0 calls these functions; the others are told the outcome.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class StepFolder:
    """A published checkpoint."""

    step: int
    path: Path
    manifest: dict[str, Any]

    @property
    def is_full(self) -> bool:
        """True when training can resume from it; a weights-only save cannot be resumed."""
        return bool(self.manifest["kind"] == "full")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint directory, or None when it has no valid one (then it is no checkpoint)."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or not {"format_version", "kind", "step"} <= manifest.keys():
        return None
    return manifest


def published_steps(folder: Path) -> list[StepFolder]:
    """All complete checkpoints of `folder`, oldest first."""
    if not folder.is_dir():
        return []
    steps = []
    for entry in folder.iterdir():
        match = _STEP.fullmatch(entry.name)
        manifest = read_manifest(entry) if match else None
        if match and manifest is not None:
            steps.append(StepFolder(int(match[1]), entry, manifest))
    return sorted(steps, key=lambda s: s.step)


def fsync_directory(path: Path) -> None:
    """Make a directory's entries (renames, new files) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json` durably; called last, when every other file of the step is on disk."""
    temporary = folder / f"{MANIFEST}.tmp"
    with open(temporary, "w") as file:
        json.dump({"format_version": FORMAT_VERSION, **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, folder / MANIFEST)
    fsync_directory(folder)


def publish(staged: Path, final: Path) -> None:
    """Give a complete staged step its name. A published step is never overwritten."""
    if final.exists():
        raise FileExistsError(f"{final} exists already: a published checkpoint is never overwritten")
    os.rename(staged, final)
    fsync_directory(final.parent)


def supersede_later(folder: Path, step: int, run_id: str) -> list[Path]:
    """Rename the published steps beyond `step`: the run restarts before them and will write them again."""
    renamed = []
    for later in published_steps(folder):
        if later.step > step:
            target = later.path.with_name(f"{later.path.name}.superseded-{run_id}")
            os.rename(later.path, target)
            renamed.append(target)
    return renamed


def remove_stale_stages(folder: Path) -> list[Path]:
    """Remove what an interrupted save or deletion has left behind."""
    stale = [p for pattern in ("step-*.tmp-*", ".trash-*") for p in folder.glob(pattern)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def retain_latest(folder: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` complete steps (0 = keep all); the newest full one always stays.

    A step is renamed out of sight first, so that a deletion cut short never leaves a half-deleted checkpoint.
    """
    if keep == 0:
        return []
    steps = published_steps(folder)
    newest_full = max((s.step for s in steps if s.is_full), default=None)
    deleted = []
    for old in steps[:-keep]:
        if old.step == newest_full or old.step == 0:
            continue
        trash = folder / f".trash-{old.step}"
        os.rename(old.path, trash)
        shutil.rmtree(trash, ignore_errors=True)
        deleted.append(old.step)
    return deleted
