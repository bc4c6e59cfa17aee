"""Summarize a checkpoint for `titan ckpt show`: manifest, files, names and shapes of tensors.

Steps and DCP folders are read without importing torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.dcp_metadata import DTYPE_BYTES, StoredEntries, list_entries
from torchtitan_like.checkpoint.start import format_of
from torchtitan_like.checkpoint.step_folders import Manifest, file_records, read_manifest
from torchtitan_like.util.units import format_bytes

# Keys of a manifest that the summary omits, because they are long or have another form there.
NOT_SHOWN = ("files", "config", "extent_bytes", "hash")
# Name of a format in `format_of` -> its name in the summary.
WITHOUT_TORCH = {"step": "native", "dcp": "dcp"}


def summarize(path: Path) -> dict[str, Any]:
    """Return what `titan ckpt show --json` prints.

    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    stored_format = None if path.is_file() else format_of(path)
    if stored_format in WITHOUT_TORCH:
        manifest = read_manifest(path) or {}
        return _summary(path, WITHOUT_TORCH[stored_format], manifest, list_entries(path))
    from torchtitan_like.checkpoint.tools.contents import dtype_name, open_contents

    contents = open_contents(path)
    tensors = {n: (shape, dtype_name(dtype)) for n, (shape, dtype) in contents.tensors.items()}
    entries = StoredEntries(tensors, contents.object_names)
    return _summary(path, contents.format, contents.manifest, entries)


def _summary(
    path: Path, format_name: str, manifest: Manifest, entries: StoredEntries
) -> dict[str, Any]:
    shapes_and_dtypes = entries.tensors.values()
    return {
        "path": str(path),
        "format": format_name,
        "manifest": {k: v for k, v in manifest.items() if k not in NOT_SHOWN},
        "files": {name: record.size for name, record in file_records(manifest).items()},
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape)}
            for name, (shape, dtype) in entries.tensors.items()
        },
        "objects": list(entries.object_names),
        "num_elements": sum(math.prod(shape) for shape, _ in shapes_and_dtypes),
        "num_bytes": sum(math.prod(shape) * DTYPE_BYTES[d] for shape, d in shapes_and_dtypes),
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
