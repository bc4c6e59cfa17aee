"""Copy complete steps to an archive, verify the copies, and remove old steps of the run."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.lock import FileLock
from torchtitan_like.checkpoint.retention import find_expired
from torchtitan_like.checkpoint.staged_output import StagedOutput
from torchtitan_like.checkpoint.step_folders import (
    Manifest,
    StepFolder,
    published_steps,
    suggest_folder,
)
from torchtitan_like.checkpoint.tools.verify import verify
from torchtitan_like.util.files import sync_path, write_atomically
from torchtitan_like.util.run_directory import PIN

Log = Callable[[str], None]


def offload(
    folder: Path, target: str, *, keep: int, command: str | None, dry_run: bool, log: Log = print
) -> bool:
    """Copy every complete step of `folder` to `target`, then remove all but the newest steps.

    A local `target` must be outside `folder`, and no copy may share files with its step. A step
    counts as copied if `target` contains its `step-N.sha256`; `sha256sum -c` reads that file.
    Copying takes hours. Meanwhile the run may write another step of the same number, so both
    copies are compared again before a step is removed. A copy on another machine cannot be read
    back: its step is kept.

    keep: number of newest steps to keep, in addition to pinned steps and the newest full step.
    command: copies one step, with {src}, {dst} and {name}; None: copy files.

    Returns False if a step is damaged. Raises CheckpointError, OSError.
    """
    if not published_steps(folder):
        raise CheckpointError(
            f"{folder} contains no complete step. Expected a run's checkpoint folder: "
            f"{suggest_folder(folder)}"
        )
    if _is_local(target) and Path(target).resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{target} is the folder of the checkpoints, or in it. Expected an archive outside "
            f"{folder}, because old steps are removed from there: choose another folder"
        )
    if dry_run:
        return _offload(folder, target, keep, command, True, log)
    lock = FileLock(
        folder / "offload.lock",
        subject=f"the offload of {folder}",
        holder="process",
        remedy="Wait until it ends: only one offload may remove the steps of a run",
    )
    with lock:
        return _offload(folder, target, keep, command, False, log)


def _offload(
    folder: Path, target: str, keep: int, command: str | None, dry_run: bool, log: Log
) -> bool:
    is_local = _is_local(target)
    copied_before: set[int] = set()
    damaged: set[int] = set()
    copied: dict[int, Manifest] = {}
    for step in published_steps(folder):
        if is_local and _checksum_file(target, step).exists():
            copied_before.add(step.step)
        elif dry_run:
            copied[step.step] = step.manifest
            log(f"{step.path} would be verified and copied to {target}")
        elif not _is_intact(step, log):
            damaged.add(step.step)
        elif is_local:
            archive_step(step, Path(target), command)
            copied[step.step] = step.manifest
            log(f"copied {step.path} to {target} and verified the copy")
        else:
            _run_copy_command(step.path, target, command)
            log(
                f"copied {step.path} to {target}; keeping it, because the copy cannot be verified "
                "from this machine"
            )

    # No run can resume from a damaged step, so it does not count as one of the newest.
    remaining = {step.step: step for step in published_steps(folder) if step.step not in damaged}
    numbered = [(number, step.path) for number, step in remaining.items()]
    expiry = find_expired(numbered, lambda number, _: remaining[number].is_full, keep)
    for step in (remaining[number] for number, _ in expiry.steps):
        if dry_run:
            outcome = "removed if its copy is intact" if is_local else "kept"
            log(f"{step.path} would be {outcome}")
            continue
        if step.step in copied_before:
            sums = _checksums(step.path, step.path.name)
            _check_copy(Path(target) / step.path.name, step, sums)
        if step.step in copied_before or copied.get(step.step) == step.manifest:
            trash = folder / f".trash-{step.step}-offloaded"
            os.rename(step.path, trash)
            shutil.rmtree(trash)
            log(f"removed {step.path}")
    return not damaged


def _is_local(target: str) -> bool:
    return "://" not in target


def _is_intact(step: StepFolder, log: Log) -> bool:
    result = verify(step)
    for line in result.lines():
        log(line)
    return not result.damage


def archive_step(step: StepFolder, target: Path, command: str | None) -> None:
    """Copy one step to a local folder, verify the copy, and write its checksums."""
    name = step.path.name
    with StagedOutput(target / name) as output:
        sums = _checksums(step.path, name)
        if command is None and not output.final.exists():
            shutil.copytree(step.path, output.path)
            for file in output.path.rglob("*"):
                sync_path(file)
            _check_copy(output.path, step, sums)
            output.publish()
        else:
            # Without a command, an interrupted offload made this copy without checksums.
            if command is not None:
                _run_copy_command(step.path, str(target), command)
            _check_copy(output.final, step, sums)
        write_atomically(_checksum_file(target, step), sums, target / f"{name}.sha256.tmp")


def _checksum_file(target: str | Path, step: StepFolder) -> Path:
    return Path(target) / f"{step.path.name}.sha256"


def _checksums(path: Path, name: str) -> str:
    """Return a line `sha256  NAME/file` for every file of a step's folder or of its copy."""
    lines = []
    for file in sorted(file for file in path.rglob("*") if file.is_file() and file.name != PIN):
        digest, buffer = hashlib.sha256(), bytearray(2**20)
        with open(file, "rb", buffering=0) as content:
            while count := content.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        lines.append(f"{digest.hexdigest()}  {name}/{file.relative_to(path).as_posix()}\n")
    return "".join(lines)


def _run_copy_command(path: Path, target: str, command: str | None) -> None:
    """Run the user's copy command. Raises CheckpointError if there is none or it fails."""
    if command is None:
        raise CheckpointError(
            f"{target} is not a local folder. Expected --command with {{src}}, {{dst}} and "
            "{name}: add it"
        )
    try:
        words = [part.format(src=path, dst=target, name=path.name) for part in shlex.split(command)]
    except (LookupError, ValueError) as error:
        raise CheckpointError(
            f"--command {command} is not valid: {error!r}. Expected {{src}}, {{dst}} and {{name}}: "
            "double all other braces"
        ) from error
    if code := subprocess.run(words).returncode:
        raise CheckpointError(
            f"{shlex.join(words)} failed with exit code {code}. Expected 0, so nothing was "
            "removed: correct the command"
        )


def _check_copy(copy: Path, step: StepFolder, sums: str) -> None:
    """Raise CheckpointError unless `copy` has the files of a step, and keeps them without it."""
    name = step.path.name
    if copy.is_dir() and _shares_files(copy, step.path):
        raise CheckpointError(
            f"{copy} has files of {step.path} itself, through a link or a mount. Expected a copy of "
            f"them, so {step.path} is kept: choose another archive, or a command that copies"
        )
    copied_sums = _checksums(copy, name) if copy.is_dir() else ""
    if copied_sums != sums:
        differing = set(sums.splitlines()) ^ set(copied_sums.splitlines())
        names = sorted({line.split("  ", 1)[1] for line in differing})
        raise CheckpointError(
            f"{copy} differs from {step.path}: {', '.join(names)}. Expected equal files, so "
            f"{step.path} is kept. To copy it again, first move {copy} and {name}.sha256 to another folder"
        )


def _shares_files(copy: Path, step: Path) -> bool:
    """Return True if `copy` would lose files when `step` is removed."""
    source = step.resolve()
    return os.path.samefile(copy, step) or any(
        path.resolve().is_relative_to(source) for path in copy.rglob("*")
    )
