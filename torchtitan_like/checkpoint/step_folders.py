"""List, read, rename, and delete the steps of a checkpoint folder. Only rank 0 calls this module.

| name | content |
| --- | --- |
| `step-N` | a published step, with a `manifest.json` |
| `step-N.tmp-<id>` | a staged step, which is never read |
| `step-N.nonfinite` | the complete state of a step with an inf or NaN, which is not a step |
| `step-N.superseded-<id>` | a step after the one at which the run restarted |
| `.trash-N` | an expired step that is being deleted |
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.verification import REMEDY, check_sizes
from torchtitan_like.util.extents import EXTENT, FileRecord
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.reading import INTEGER, TEXT, check_kinds, parse_json, read_text
from torchtitan_like.util.run_directory import (
    CONFIG,
    MANIFEST,
    PIN,
    STEP,
    numbered_folders,
    steps_below,
)

logger = logging.getLogger()

FORMAT_VERSION = 3  # the only one that is read
HF_EXPORTS = "hf"  # folder of the exports, below the one of the checkpoints
# Keys that `write_manifest` and `StepWriter` set. All others are the run's summary.
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
_INTEGERS = (
    *("format_version", "step", "seed", "global_batch_size", "metrics_bytes", "n_tokens_seen"),
    "position",
)
_KINDS = {**dict.fromkeys(_INTEGERS, INTEGER), "kind": TEXT, "config": TEXT}
# Errors that mean damage: a bad sector, a folder or pipe of that name, or an endless file.
_NO_MANIFEST = (errno.EIO, errno.EISDIR, errno.EINVAL, errno.EFBIG)
_NO_STATE = {CONFIG, PIN}  # files of a step without state
NONFINITE = ".nonfinite"  # suffix of a state with an inf or NaN, kept for debugging
_TRASH = ".trash-"
_NONFINITE = re.compile(STEP.pattern + re.escape(NONFINITE))
_SUPERSEDED = re.compile(rf"{STEP.pattern}\.superseded-.*")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class StepFolder:
    """A published checkpoint. `damage` describes missing files and wrong sizes, or is None."""

    step: int
    path: Path
    manifest: Manifest  # empty when it cannot be read
    damage: str | None = None

    @property
    def is_full(self) -> bool:
        """True if training can resume from it: it holds the full state and is not damaged."""
        return self.damage is None and self.manifest["kind"] == "full"


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if the folder is not a checkpoint of this program.

    Raises DamagedError if the manifest is damaged. Raises CheckpointError if it cannot be read, for
    example without permission, or if it has another format. The step is then still good.
    """
    file = path / MANIFEST
    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError):
        if file.is_symlink() or any(path.glob("shard-*.bin")):
            raise DamagedError(
                f"{file} is missing. Expected it, to verify the other files: {REMEDY}"
            ) from None
        if (path / CONFIG).is_file() and any(path.glob("*.safetensors")):
            raise DamagedError(
                f"{file} is missing. Expected it, because {CONFIG} marks an export of this "
                f"program: {REMEDY}. To load it unverified, copy it without {CONFIG}"
            ) from None
        return None
    except OSError as error:
        kind = DamagedError if error.errno in _NO_MANIFEST else CheckpointError
        raise kind(
            f"{file} cannot be read: {error}. Expected a readable manifest: check the disk"
        ) from error
    except UnicodeDecodeError as error:
        raise DamagedError(
            f"{file} cannot be read: {error}. Expected UTF-8 text: {REMEDY}"
        ) from error
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: {error}. Expected valid JSON: {REMEDY}") from error
    if not isinstance(manifest, dict) or any(
        manifest.get(key) is None for key in ("format_version", "kind", "step")
    ):
        raise DamagedError(
            f"{file} is damaged: it lacks keys. Expected an object with format_version, kind and "
            f"step: {REMEDY}"
        )
    if manifest.pop("self", None) != _hash(manifest):
        raise DamagedError(
            f"{file} is damaged: its content has another hash. Expected the one in its key "
            f"self: {REMEDY}"
        )
    version = manifest["format_version"]
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version}. Expected {FORMAT_VERSION}: read it with the "
            "version of this program that wrote it"
        )
    try:
        check_kinds(manifest, _KINDS)
        check_kinds(manifest.get("data") or {}, {"position": INTEGER})
    except (AttributeError, ValueError) as error:
        raise DamagedError(f"{file} is damaged: {error}. Expected other types: {REMEDY}") from error
    _check_files(file, manifest.get("files"))
    return manifest


def _check_files(file: Path, records: Any) -> None:
    """Raise DamagedError unless "files" of a manifest is a table of records in its own folder."""
    try:
        for name, record in records.items():
            if not is_inside(name):
                raise DamagedError(
                    f"{file} names the file {name!r}. Expected one in its own folder: do not use "
                    "this checkpoint"
                )
            if type(record["size"]) is not int or not all(
                type(digest) is str for digest in record["extents"]
            ):
                raise TypeError(name)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{file} is damaged: {error!r}. Expected size and hashes of every file: {REMEDY}"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` durably, after all other files of the step.

    Values may be dataclasses (`FileRecord`). Adds the format version, the hash function, and the
    key `self`, which is the hash of the manifest itself.
    """
    header = {"format_version": FORMAT_VERSION, "extent_bytes": EXTENT, "hash": "xxh3_128"}
    complete = json.loads(json.dumps({**header, **manifest}, default=dataclasses.asdict))
    complete["self"] = _hash(complete)
    content = json.dumps(complete, indent=1)
    write_atomically(folder / MANIFEST, content, folder / f"{MANIFEST}.tmp")


def _hash(manifest: Manifest) -> str:
    """Return the xxh3-128 of a manifest without `self` as JSON with sorted keys and no spaces."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(canonical.encode()))


def all_steps(folder: Path) -> list[StepFolder]:
    """Return every step of `folder`, oldest first, including damaged and emptied ones.

    Raises CheckpointError like `read_manifest`.
    """
    steps = (read_step(number, path) for number, path in numbered_folders(folder))
    return [step for step in steps if step is not None]


def emptied(path: Path) -> str | None:
    """Describe a folder whose state files were all deleted, for example by a cleaner of old files.

    Returns None for other folders.
    """
    names = {file.name for file in path.rglob("*") if not file.is_dir()}
    if names - _NO_STATE:
        return None
    return f"{path} is empty" + (f" except for {', '.join(sorted(names))}" if names else "")


def published_steps(folder: Path) -> list[StepFolder]:
    """Return all complete checkpoints of `folder`, oldest first."""
    return [step for step in all_steps(folder) if step.damage is None]


def newest_below(path: Path) -> Path | None:
    """Return the newest step in `path`, or else in a folder of `path`; None if there is none."""
    steps = steps_below(path)
    return steps[-1][1] if steps else None


def suggest_step(path: Path) -> str:
    """Return a remedy for a path that is not a step: a step below it, if there is one."""
    newest = newest_below(path)
    return "check the path" if newest is None else f"give a step, such as {newest}"


def superseded_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and exports that `supersede_later` has renamed, with their numbers."""
    parents = (folder, folder / HF_EXPORTS)
    return [match for parent in parents for match in numbered_folders(parent, _SUPERSEDED)]


def read_step(number: int, path: Path) -> StepFolder | None:
    """Read a step's manifest, and compare the names and sizes of its files.

    Returns None if the folder is not a checkpoint or was deleted in the meantime.
    """
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
    """Return every `step-N.nonfinite` of `folder`, ordered by number."""
    return [path for _, path in numbered_folders(folder, _NONFINITE)]


def file_records(manifest: Manifest) -> dict[str, FileRecord]:
    """Return the record of each file of a step. Empty without a readable manifest."""
    return {
        name: FileRecord(f["size"], tuple(f["extents"]))
        for name, f in manifest.get("files", {}).items()
    }


def _damage(number: int, path: Path, manifest: Manifest) -> str | None:
    """Describe missing files and wrong sizes, or return None. Readers verify the content."""
    if manifest["step"] != number:
        return (
            f"{path} holds step {manifest['step']}, by its manifest. Expected step {number}: undo the "
            "renaming"
        )
    try:
        check_sizes(path, file_records(manifest))
    except DamagedError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Expected a readable step: check its permissions"
            ) from error
        return str(error)
    return None


def supersede_later(folder: Path, step: int, run_id: str) -> list[Path]:
    """Rename all steps and exports after the restart at `step`. Returns the new paths."""
    renamed = []
    for parent in (folder, folder / HF_EXPORTS):
        for number, path in numbered_folders(parent):
            if number > step:
                target = path.with_name(f"{path.name}.superseded-{run_id}")
                os.rename(path, target)
                renamed.append(target)
    return renamed


def stale_stages(folder: Path) -> list[Path]:
    """Return the staged steps of a checkpoint folder, interrupted or still being written."""
    parents = (folder, folder / HF_EXPORTS)
    return [path for parent in parents for path in parent.glob("step-*.tmp-*")]


def remove_stale_stages(folder: Path) -> list[Path]:
    """Remove staged steps of killed runs. Call it only while holding the folder's lock."""
    stale = stale_stages(folder)
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


# ---- retention


class Expiry(NamedTuple):
    """The expired steps."""

    steps: list[tuple[int, Path]]  # oldest first
    newest_full: tuple[int, Path] | None
    oldest_of_newest: int | None  # number of the `keep_latest_k`-th newest step, if it exists


def find_expired(
    folders: Sequence[tuple[int, Path]],
    is_full: Callable[[int, Path], bool | None],
    keep_latest_k: int,
    keep_every: int = 0,
) -> Expiry:
    """Return the expired steps of `folders`, which are sorted from the oldest. 0 keeps all.

    Kept are the newest `keep_latest_k`, multiples of `keep_every`, pinned steps, step 0, and the
    newest full step. `is_full` returns None for an incomplete checkpoint, which is neither counted
    nor deleted. It reads files, so it is called as rarely as possible.
    """
    num_newest, oldest_of_newest = 0, None
    newest_full: tuple[int, Path] | None = None
    expired: list[tuple[int, Path]] = []
    if 0 < keep_latest_k <= len(folders):
        for number, path in reversed(folders):
            is_older = num_newest == keep_latest_k
            is_kept = number == 0 or (keep_every > 0 and number % keep_every == 0)
            if is_older and newest_full and (is_kept or (path / PIN).exists()):
                continue
            full = is_full(number, path)
            if full is None:
                continue
            if not is_older:
                num_newest, oldest_of_newest = num_newest + 1, number
            elif (newest_full or not full) and not is_kept and not (path / PIN).exists():
                expired.append((number, path))
            if full and newest_full is None:
                newest_full = number, path
    is_enough = num_newest == keep_latest_k
    return Expiry(expired[::-1], newest_full, oldest_of_newest if is_enough else None)


def newest_before(folder: Path, step: int) -> StepFolder | None:
    """Return the newest full step before `step`, except step 0, which is never deleted."""
    earlier = [(number, path) for number, path in numbered_folders(folder) if 0 < number < step]
    steps = (read_step(number, path) for number, path in reversed(earlier))
    return next((step for step in steps if step is not None and step.is_full), None)


def pin_before(folder: Path, step: int) -> Path | None:
    """Pin the newest full step before `step`. Returns its pin.

    Returns None if there is no such step or it is pinned already.
    """
    newest = newest_before(folder, step)
    if newest is None or (pin := newest.path / PIN).exists():
        return None
    pin.touch()
    logger.info(f"Pinned {newest.path}. To unpin it, remove its file {PIN}")
    return pin


class Retention:
    """Deletes expired steps of a folder in a thread. Use it only while holding the folder's lock.

    A step is renamed before it is deleted, so that an interrupted deletion never leaves a partial
    checkpoint. Failed deletions are retried after each checkpoint.
    """

    def __init__(self, folder: Path, *, keep_latest_k: int, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep_latest_k = keep_latest_k
        self.keep_every = keep_every
        self._is_full_cache: dict[Path, bool | None] = {}  # values of `_is_full`
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="retention")

    def apply(self) -> list[int]:
        """Rename the expired steps and start their deletion. Returns their numbers.

        Each manifest is read once, so that the cost does not grow with the number of kept steps.
        The newest full step is read again before any deletion, because it may be damaged since.
        A superseded step expires when `keep_latest_k` complete steps have at least its number.
        """
        folders = numbered_folders(self.folder) if self.keep_latest_k else []
        present = {path for _, path in folders}
        self._is_full_cache = {
            path: full for path, full in self._is_full_cache.items() if path in present
        }
        expiry = self._find_expired(folders)
        if expiry.steps and expiry.newest_full is not None:
            self._is_full_cache.pop(expiry.newest_full[1])  # it may have been damaged since
            if not self._is_full(*expiry.newest_full):
                self._is_full_cache.clear()
                expiry = self._find_expired(folders)
        for number, path in expiry.steps:
            self._discard(number, path)
        if expiry.oldest_of_newest is not None:
            for number, path in superseded_folders(self.folder):
                if number <= expiry.oldest_of_newest and not (path / PIN).exists():
                    logger.info(f"Deleting {path}: newer checkpoints replace step {number}")
                    self._discard(number, path)
        self._deleter.submit(self._empty_trash)
        return [number for number, _ in expiry.steps]

    def _find_expired(self, folders: Sequence[tuple[int, Path]]) -> Expiry:
        return find_expired(folders, self._is_full, self.keep_latest_k, self.keep_every)

    def _is_full(self, number: int, path: Path) -> bool | None:
        if path not in self._is_full_cache:
            step = read_step(number, path)
            is_whole = step is not None and step.damage is None
            self._is_full_cache[path] = step.is_full if step is not None and is_whole else None
        return self._is_full_cache[path]

    def _discard(self, number: int, path: Path) -> None:
        candidates = (self.folder / f"{_TRASH}{number}{suffix}" for suffix in _suffixes())
        os.rename(path, next(trash for trash in candidates if not trash.exists()))

    def close(self) -> None:
        """Wait until all expired steps are deleted."""
        self._deleter.shutdown()

    def _empty_trash(self) -> None:
        for path in self.folder.glob(f"{_TRASH}*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning(
                    f"Could not delete {path}, retrying after the next checkpoint: {error}"
                )


def _suffixes() -> itertools.chain[str]:
    return itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
