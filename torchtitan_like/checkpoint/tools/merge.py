"""Merge the safetensors shards of a distributed checkpoint into whole files."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import FileRecord
from torchtitan_like.checkpoint.hf.consolidate import consolidate
from torchtitan_like.checkpoint.hf.folder import read_weight_map


def merge_shards(
    shards: Path,
    out: Path,
    *,
    num_threads: int,
    index: Path | None,
    removes_shards: bool,
) -> dict[str, FileRecord]:
    """Merge all shards in `shards` into whole files in `out`. All ranks call it together.

    index: a model.safetensors.index.json that assigns tensors to files.
    removes_shards: delete the shards after the output is written and read back.

    Raises CheckpointError, OSError.
    """
    mapping = None
    if index is not None:
        files = read_weight_map(index)
        numbers = {file: i for i, file in enumerate(sorted(set(files.values())), start=1)}
        mapping = {name: numbers[file] for name, file in files.items()}
    if removes_shards and shards.resolve() == out.resolve():
        raise CheckpointError(
            f"{out} also contains the shards, and --remove-shards would delete the output. "
            "Expected two different folders: choose another output"
        )
    records = consolidate(shards, out, mapping, num_threads)
    if removes_shards and (not dist.is_initialized() or dist.get_rank() == 0):
        for path in shards.glob("*.safetensors"):
            path.unlink()
    return records
