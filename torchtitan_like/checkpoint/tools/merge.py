"""Merge the safetensors shards of a distributed checkpoint into whole files."""

from __future__ import annotations

from pathlib import Path

from torchtitan_like.checkpoint.hf.consolidate import NUM_THREADS, SHARDING_INFO, consolidate
from torchtitan_like.checkpoint.hf.folder import read_weight_map
from torchtitan_like.checkpoint.hf.safetensors_file import read_header


def has_shards(folder: Path) -> bool:
    """Return whether torch's `HuggingFaceStorageWriter(save_distributed=True)` wrote a file in it.

    Raises DamagedError, OSError.
    """
    return any(SHARDING_INFO in read_header(path)[1] for path in folder.glob("*.safetensors"))


def merge_shards(shards: Path, out: Path, num_threads: int | None, index: Path | None) -> None:
    """Merge all shards in `shards` into whole files in `out`. All ranks call it together.

    num_threads: threads that copy on each rank; None: `NUM_THREADS`.
    index: a model.safetensors.index.json that assigns tensors to files; None: one file.

    Raises CheckpointError, OSError.
    """
    mapping = None
    if index is not None:
        files = read_weight_map(index)
        numbers = {file: i for i, file in enumerate(sorted(set(files.values())), start=1)}
        mapping = {name: numbers[file] for name, file in files.items()}
    consolidate(shards, out, mapping, num_threads or NUM_THREADS)
