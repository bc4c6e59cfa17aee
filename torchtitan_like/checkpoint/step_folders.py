"""The checkpoint folder as a list of steps: which are complete, which are damaged, which is newest.

A step is a directory `step-N` with a `manifest.json`; staged ones are called `step-N.tmp-<id>` and are never read.
`step-N.nonfinite` is the complete state of a step that holds an inf or nan. No function here takes it for a step.
Only rank 0 calls these functions; the others are told the outcome.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.extents import EXTENT, FileRecord, check_sizes, naming
from torchtitan_like.util.files import sync_path, write_atomically
from torchtitan_like.util.reading import parse_json, read_text

MANIFEST = "manifest.json"
FORMAT_VERSION = (
    2  # 1 had neither "files" nor "self": such a step is read, but nothing of it is verified
)
HF_EXPORTS = "hf"  # folder of the exports, below the one of the checkpoints
# What `write_manifest` and the writer of a step set; the rest of a manifest is the run's summary.
MANIFEST_OWN_KEYS = {
    "format_version",
    "extent_bytes",
    "hash",
    "self",
    "kind",
    "step",
    "config",
    "files",
}
CONFIG = "config.toml"  # of the run; in its exports too
# Errors that a healthy manifest cannot have: a bad sector, a folder or a pipe of that name, a file without end.
_NO_MANIFEST = (errno.EIO, errno.EISDIR, errno.EINVAL, errno.EFBIG)
_NO_CONTENT = {CONFIG, "PIN"}  # files of a step that hold nothing of its state
NONFINITE = ".nonfinite"  # suffix of a state with an inf or nan, kept for study
_STEP = re.compile(r"step-(\d+)")
_SUPERSEDED = re.compile(r"step-(\d+)\.superseded-.*")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class StepFolder:
    """A published checkpoint; `damage` says what is wrong with it, in a sentence, as far as names and sizes tell."""

    step: int
    path: Path
    manifest: Manifest  # empty when it cannot be read
    damage: str | None = None

    @property
    def is_full(self) -> bool:
        """True when training can resume from it: a save of weights cannot, a damaged one must not."""
        return self.damage is None and self.manifest["kind"] == "full"


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a directory; None when there is none: the directory is no checkpoint of ours.

    Raises DamagedError when there is one that cannot be believed, CheckpointError when it cannot be looked at or is a
    newer program's: no step must be given up for a missing permission or a file server that is away.
    """
    file = path / MANIFEST
    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError):
        if file.is_symlink() or any(path.glob("shard-*.bin")):
            raise DamagedError(
                f"{file} is missing: what the other files should hold is not known"
            ) from None
        if (path / CONFIG).is_file() and any(path.glob("*.safetensors")):
            raise DamagedError(
                f"{file} is missing, and {CONFIG} shows that this is an export of this program: its files cannot be "
                f"verified. To load it unverified, copy it without {CONFIG}"
            ) from None
        return None
    except OSError as error:
        kind = DamagedError if error.errno in _NO_MANIFEST else CheckpointError
        raise kind(f"{file} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: it is no valid JSON ({error})") from error
    if not isinstance(manifest, dict) or not {"format_version", "kind", "step"} <= manifest.keys():
        raise DamagedError(
            f"{file} is damaged: expected an object with format_version, kind and step"
        )
    if manifest["format_version"] != 1 or "self" in manifest:
        newer = (
            isinstance(manifest["format_version"], int)
            and manifest["format_version"] > FORMAT_VERSION
        )
        if manifest.pop("self", None) != _hash(manifest):
            raise DamagedError(
                f"{file} is damaged: its text is not the one that was written (its own hash differs)"
            )
        if newer:
            raise CheckpointError(
                f"{file} was written by a newer version of this program (format_version "
                f"{manifest['format_version']}, this one knows {FORMAT_VERSION}): use that version to read it"
            )
    _check_files(file, manifest.get("files", {}))
    return manifest


def _check_files(file: Path, records: Any) -> None:
    """Raise DamagedError unless a manifest's "files" is a table of records, all of files in its folder."""
    try:
        for name, record in records.items():
            if not is_inside(name):
                raise DamagedError(
                    f"{file} names the file {name!r}: expected one in its own folder"
                )
            if type(record["size"]) is not int or not all(
                type(digest) is str for digest in record["extents"]
            ):
                raise TypeError(name)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{file} is damaged: it does not say what its files hold ({error!r})"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` durably; called last, when every other file of the step is on disk.

    Values may be dataclasses (`FileRecord`). Adds `format_version`, how files are hashed, and `self`: the hash by which a
    flipped bit of the manifest itself is found.
    """
    form = {"format_version": FORMAT_VERSION, "extent_bytes": EXTENT, "hash": "xxh3_128"}
    complete = json.loads(json.dumps({**form, **manifest}, default=dataclasses.asdict))
    complete["self"] = _hash(complete)
    temporary = folder / f"{MANIFEST}.tmp"
    with naming(temporary):
        write_atomically(folder / MANIFEST, json.dumps(complete, indent=1), temporary)


def _hash(manifest: Manifest) -> str:
    """xxh3-128 of the manifest as canonical JSON: sorted keys, no spaces, without `self`."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def all_steps(folder: Path) -> list[StepFolder]:
    """Every `step-N` of `folder` with a manifest or nothing at all, oldest first, the damaged ones too.

    Raises as `read_manifest` for others.
    """
    found = (read_step(number, path) for number, path in numbered_folders(folder))
    return [step for step in found if step is not None]


def emptied(path: Path) -> str | None:
    """Describe a folder that has lost all of a checkpoint, as cleaners of old files leave it; None for others."""
    left = {file.name for file in path.rglob("*") if not file.is_dir()}
    if left - _NO_CONTENT:
        return None
    return f"{path} is empty" + (f" but for {', '.join(sorted(left))}" if left else "")


def published_steps(folder: Path) -> list[StepFolder]:
    """All complete checkpoints of `folder`, oldest first."""
    return [step for step in all_steps(folder) if step.damage is None]


def numbered_folders(folder: Path) -> list[tuple[int, Path]]:
    """Every directory named `step-N` of `folder` with its number, in order, whatever is in it."""
    return _matching_folders(folder, _STEP)


def superseded_folders(folder: Path) -> list[tuple[int, Path]]:
    """Steps that `supersede_later` has renamed, exports too, with their numbers."""
    places = (folder, folder / HF_EXPORTS)
    return [found for place in places for found in _matching_folders(place, _SUPERSEDED)]


def _matching_folders(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """One listing of the folder; the file system is not asked about each entry."""
    try:
        with os.scandir(folder) as entries:
            found = [
                (int(match[1]), folder / entry.name)
                for entry in entries
                if (match := pattern.fullmatch(entry.name)) and entry.is_dir()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)


def read_step(number: int, path: Path) -> StepFolder | None:
    """Read a step's manifest and compare names and sizes with it; None: no checkpoint, or gone meanwhile."""
    try:
        manifest = read_manifest(path)
        damage = emptied(path) if manifest is None else _damage(number, path, manifest)
    except DamagedError as error:
        manifest, damage = {}, str(error)
    except FileNotFoundError:
        return None
    if (manifest is None and damage is None) or (damage and not path.is_dir()):
        return None
    return StepFolder(number, path, manifest or {}, damage)


def is_inside(name: str) -> bool:
    """Return True if a path from a stored file stays in its folder: relative, without `..`."""
    path = PurePosixPath(name)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    )


def nonfinite_states(folder: Path) -> list[Path]:
    """Every `step-N.nonfinite` of `folder`, by number."""
    found = [
        (_STEP.fullmatch(path.name.removesuffix(NONFINITE)), path)
        for path in folder.glob(f"*{NONFINITE}")
    ]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def file_records(manifest: Manifest) -> dict[str, FileRecord]:
    """What each file of a step holds; empty for format_version 1."""
    return {
        name: FileRecord(f["size"], tuple(f["extents"]))
        for name, f in manifest.get("files", {}).items()
    }


def _damage(number: int, path: Path, manifest: Manifest) -> str | None:
    """What names and sizes show at once; what is inside is verified by whoever reads it."""
    if manifest["step"] != number:
        return (
            f"{path} holds step {manifest['step']}, by its manifest: it has been renamed or copied"
        )
    try:
        check_sizes(path, file_records(manifest))
    except DamagedError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise CheckpointError(f"{path} cannot be looked at: {error}") from error
        return str(error)
    return None


def publish(staged: Path, final: Path) -> None:
    """Give a complete staged step its name. A published step is never overwritten."""
    if final.exists():
        raise FileExistsError(
            f"{final} exists already: a published checkpoint is never overwritten"
        )
    os.rename(staged, final)
    sync_path(final.parent)
    sync_path(final.parent.parent)  # the folder itself may be new


def supersede_later(folder: Path, step: int, run_id: str) -> list[Path]:
    """Rename every `step-N` beyond `step`, exports too: the run restarts before them and will write them again."""
    renamed = []
    for place in (folder, folder / HF_EXPORTS):
        for number, path in numbered_folders(place):
            if number > step:
                target = path.with_name(f"{path.name}.superseded-{run_id}")
                os.rename(path, target)
                renamed.append(target)
    return renamed


def stale_stages(folder: Path) -> list[Path]:
    """What an interrupted save has left in a checkpoint folder, or a save under way has staged."""
    return [path for place in (folder, folder / HF_EXPORTS) for path in place.glob("step-*.tmp-*")]


def remove_stale_stages(folder: Path) -> list[Path]:
    """Remove what an interrupted save has left behind. Only for the holder of the folder's lock."""
    stale = stale_stages(folder)
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale
