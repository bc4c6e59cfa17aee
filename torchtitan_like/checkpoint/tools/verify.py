"""Verify checkpoints: read every byte and compare it with the hashes in the manifest."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.step_folders import (
    HF_EXPORTS,
    StepFolder,
    all_steps,
    file_records,
    read_manifest,
)
from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.util.output import ProgressLine
from torchtitan_like.util.run_directory import MANIFEST, PIN
from torchtitan_like.util.units import format_bytes


@dataclass(frozen=True)
class Verification:
    """The result of one step.

    damage         one sentence for every damaged file; empty if the step is intact
    num_bytes      number of bytes compared with a hash; None if the manifest is damaged
    unlisted       files in the folder that the manifest does not list
    is_gone        a run deleted or renamed the step during verification
    """

    path: Path
    damage: tuple[str, ...] = ()
    num_bytes: int | None = None
    unlisted: tuple[str, ...] = ()
    is_gone: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what `titan ckpt verify --json` prints."""
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """Return what `titan ckpt verify` prints."""
        if self.is_gone:
            return [f"{self.path}: not verified, because a run deleted or renamed it"]
        lines = [*self.damage]
        if self.unlisted:
            names = ", ".join(self.unlisted)
            lines.append(f"{self.path}: files that are not in the manifest, not verified: {names}")
        if not self.damage:
            lines.append(f"{self.path}: intact, {format_bytes(self.num_bytes or 0)} verified")
        return lines


def find_steps(path: Path) -> list[StepFolder]:
    """Return the step at `path`, or every step in the folder `path`, exports included.

    Raises CheckpointError if there is none.
    """
    manifest = read_manifest(path)
    if manifest is not None:
        return [StepFolder(manifest["step"], path, manifest)]
    steps = [*all_steps(path), *all_steps(path / HF_EXPORTS)]
    if not steps:
        raise CheckpointError(
            f"{path} contains no checkpoint. Expected a step with {MANIFEST}, or a folder of such "
            "steps: check the path"
        )
    return steps


def verify(step: StepFolder) -> Verification:
    """Read every extent of a step. Progress goes to stderr. Raises OSError."""
    try:
        return _verify_files(step)
    except FileNotFoundError:
        if step.path.exists():
            raise
        return Verification(step.path, is_gone=True)


def _verify_files(step: StepFolder) -> Verification:
    records = file_records(step.manifest)
    line = ProgressLine("", format_bytes)
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        line(step.path.name, done, total, time.monotonic() - started)

    # find_damage also reports wrong sizes. An unreadable manifest has no records.
    damage = [str(error) for error in find_damage(step.path, records, progress=progress)]
    if not damage and step.damage:
        damage = [step.damage]
    if damage and not step.path.exists():
        raise FileNotFoundError(step.path)
    listed = {*records, MANIFEST, PIN}
    files = (file for file in step.path.rglob("*") if file.is_file())
    names = {file.relative_to(step.path).as_posix() for file in files}
    return Verification(
        step.path,
        damage=tuple(damage),
        num_bytes=sum(record.size for record in records.values()) if records else None,
        unlisted=tuple(sorted(names - listed)) if records else (),
    )
