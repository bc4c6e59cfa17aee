"""Verify checkpoints: read every byte and compare it with the hashes in the manifest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
from torchtitan_like.util.output import show_error
from torchtitan_like.util.run_directory import MANIFEST, PIN
from torchtitan_like.util.units import format_bytes, format_duration


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
    meter = ProgressMeter(step.path.name)
    # find_damage also reports wrong sizes. An unreadable manifest has no records.
    damage = [str(error) for error in find_damage(step.path, records, progress=meter)]
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


class ProgressMeter:
    """Prints percentage, rate and remaining time of a read to stderr, at most once a second."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.clock = clock
        self.start = clock()
        self.last_print = self.start

    def __call__(self, done: int, total: int) -> None:
        now = self.clock()
        if now - self.last_print < 1 and done < total:
            return
        self.last_print = now
        rate = done / max(now - self.start, 1e-9)
        remaining = format_duration((total - done) / rate)
        speed = f"{format_bytes(rate)}/s"
        show_error(
            f"{self.name}: {done / total:4.0%} of {format_bytes(total)}, {speed}, "
            f"{remaining} left  ",
            end="\r" if sys.stderr.isatty() and done < total else "\n",
        )
