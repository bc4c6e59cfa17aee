"""List the checkpoints of a run, complete or not, and the contents of one of them.

Steps and DCP folders are read without importing torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.dcp_metadata import DTYPE_BYTES, read_metadata
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.staged_output import STAGED
from torchtitan_like.checkpoint.start import FORMAT_NAMES, Format, format_of
from torchtitan_like.checkpoint.step_folders import (
    HF_EXPORTS,
    NONFINITE,
    StepFolder,
    all_steps,
    file_records,
    read_manifest,
)
from torchtitan_like.util.run_directory import MANIFEST, PIN, numbered_folders
from torchtitan_like.util.units import format_bytes, format_duration

# Part of a folder's name -> kind of the folder in the listing.
UNPUBLISHED = (
    (".tmp-", "unfinished"),
    (STAGED, "unfinished"),
    (".superseded-", "superseded"),
    (NONFINITE, "non-finite"),
    (".trash-", "being deleted"),
)

# Keys of a manifest that the summary omits, because they are long or have another form there.
NOT_SHOWN = ("files", "config", "extent_bytes", "hash")


@dataclass(frozen=True)
class Entry:
    """A folder in a run's checkpoint folder. `modified`: Unix time of its newest file."""

    name: str
    kind: str
    num_bytes: int
    modified: float
    notes: tuple[str, ...]

    def format_row(self, now: float) -> str:
        """Return the line that `titan ckpt ls` prints."""
        age = f"{format_duration(now - self.modified)} ago"
        size, notes = format_bytes(self.num_bytes), ", ".join(self.notes)
        return f"{self.name:<28} {self.kind:<12} {size:>10} {age:>12}  {notes}".rstrip()


def list_checkpoints(folder: Path) -> list[Entry]:
    """List the checkpoints in `folder` and its Hugging Face exports.

    Raises CheckpointError if there are none, OSError.
    """
    os.listdir(folder)  # an OSError if it is missing, a file, or not readable
    parents = [path for path in (folder, folder / HF_EXPORTS) if path.is_dir()]
    entries = [entry for parent in parents for entry in _entries(parent, folder)]
    if not entries:
        raise CheckpointError(
            f"{folder} contains no step-N. Expected a run's checkpoint folder: check the path"
        )
    return entries


def format_entries(entries: list[Entry]) -> list[str]:
    """Return the table that `titan ckpt ls` prints."""
    now = time.time()
    return [entry.format_row(now) for entry in entries]


def _entries(parent: Path, folder: Path) -> Iterator[Entry]:
    steps = {step.path: step for step in all_steps(parent)}
    numbered = {path for _, path in numbered_folders(parent)}
    for path in sorted(filter(Path.is_dir, parent.iterdir()), key=_sort_key):
        try:
            files = [file.stat() for file in path.rglob("*") if file.is_file()]
            modified = max((file.st_mtime for file in files), default=path.stat().st_mtime)
        except FileNotFoundError:  # a live run renamed or deleted the folder
            continue
        kind, notes = _describe(path, steps.get(path), path in numbered)
        if kind is None:
            continue
        if (path / PIN).exists():
            notes.append("pinned")
        name = path.relative_to(folder).as_posix()
        yield Entry(name, kind, sum(file.st_size for file in files), modified, tuple(notes))


def _describe(
    path: Path, step: StepFolder | None, is_numbered: bool
) -> tuple[str | None, list[str]]:
    """Return the kind of a folder and notes. The kind is None if it is not a checkpoint."""
    if step is not None:
        if step.damage:
            return "DAMAGED", [step.damage]
        return str(step.manifest.get("kind", "?")), []
    for mark, kind in UNPUBLISHED:
        if mark in path.name:
            return kind, []
    if not is_numbered:
        return None, []
    if format_name := format_of(path):
        return "foreign", [FORMAT_NAMES[format_name]]
    return "incomplete", [f"no {MANIFEST}, not readable"]


def _sort_key(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.name)
    return int(number[0]) if number else 0, path.name


# ---- titan ckpt show


def summarize(path: Path) -> dict[str, Any]:
    """Return what `titan ckpt show --json` prints.

    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    stored_format = None if path.is_file() else format_of(path)
    if stored_format in ("native", "dcp"):
        manifest = read_manifest(path) or {}
        metadata = read_metadata(path, file_records(manifest) if manifest else None)
        format_name: Format = stored_format
        tensors = {name: (entry.shape, entry.dtype) for name, entry in metadata.tensors.items()}
        object_names = tuple(metadata.objects)
    else:
        from torchtitan_like.checkpoint.tools.open_checkpoint import dtype_name, open_checkpoint

        source = open_checkpoint(path)
        manifest, format_name, object_names = source.manifest, source.format, source.object_names
        tensors = {n: (info.shape, dtype_name(info.dtype)) for n, info in source.stored.items()}
    return {
        "path": str(path),
        "format": format_name,
        "manifest": {k: v for k, v in manifest.items() if k not in NOT_SHOWN},
        "files": {name: record.size for name, record in file_records(manifest).items()},
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape)} for name, (shape, dtype) in tensors.items()
        },
        "objects": list(object_names),
        "num_elements": sum(math.prod(shape) for shape, _ in tensors.values()),
        "num_bytes": sum(math.prod(shape) * DTYPE_BYTES[d] for shape, d in tensors.values()),
    }


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of `titan ckpt show`: manifest, files and every tensor."""
    lines = []
    for key, value in summary["manifest"].items():
        lines.append(f"{key}: {json.dumps(value) if isinstance(value, dict | list) else value}")
    for name, size in summary["files"].items():
        lines.append(f"file {name}: {size:,} bytes")
    for name, tensor in summary["tensors"].items():
        lines.append(f"{name}  {tensor['dtype']}  {tensor['shape']}")
    for name in summary["objects"]:
        lines.append(f"{name}  (not a tensor)")
    count, elements = len(summary["tensors"]), summary["num_elements"]
    lines.append(f"{count} tensors, {elements:,} elements, {format_bytes(summary['num_bytes'])}")
    return lines
