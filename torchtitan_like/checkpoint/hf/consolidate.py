"""Merge a folder of shard files into whole safetensors files; the ranks of a group share the work.

Torch's `HuggingFaceStorageWriter(save_distributed=True)` writes such shards: each file holds one
rectangle of each of its tensors, and the rectangles' offsets as metadata. Before the first byte is
written, this module checks that the shards cover each tensor exactly once and that the mapping has
all names.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.output_files import Output, run_in_rounds
from torchtitan_like.checkpoint.hf.plan import (
    ExtentId,
    OutputTensor,
    extents_of,
    group_by_file,
    lay_out_files,
    natural_key,
)
from torchtitan_like.checkpoint.hf.safetensors_file import (
    DTYPES,
    FileLayout,
    dtype_code,
    read_weight_map,
)
from torchtitan_like.checkpoint.hf.safetensors_source import open_shards
from torchtitan_like.checkpoint.source import Read
from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.boxes import rectangles, sizes_of
from torchtitan_like.util.extents import EXTENT, FileRecord

logger = logging.getLogger()

NUM_THREADS = 5
EXTENTS_PER_ROUND = 4  # of each thread, between two checks for failures of other ranks


def consolidate(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = NUM_THREADS,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Merge all shards in `input_dir` into whole files in `output_dir`; all ranks call it together.

    fqn_to_index_mapping: tensor name -> number of its output file, for all stored tensors and no
        others. None: one file.
    num_threads: number of extents copied at a time on each rank.
    process_group: the ranks that divide the bytes among them. None: the default group if there is
        one, else only this process. Every rank needs access to both folders.

    The files equal a direct export byte for byte, for any number of ranks. The output is read back
    and compared. Returns the records of all files on every rank.

    Raises CheckpointError on all ranks. Missing shards, overlapping shards, and a wrong mapping are
    reported before anything is written. Torch's shards do not store full shapes: a missing last
    shard is detected only if it leaves a hole.
    """
    if num_threads < 1:
        raise CheckpointError(f"num_threads is {num_threads}. Expected at least 1: correct it")
    group = _CallersGroup(process_group)
    with_checkpoint_errors(group)
    try:
        return _consolidate(
            Path(input_dir), Path(output_dir), fqn_to_index_mapping, num_threads, group
        )
    finally:
        group.leave()


class _CallersGroup(HostGroup):
    """The ranks of the caller's process group. Without a CPU backend it is a new gloo group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.size = 1 if group is None else group.size()
        self.group = group if self.size > 1 else None
        self._is_new = (
            self.group is not None and torch.device("cpu") not in self.group._device_types
        )
        if self._is_new:
            ranks = dist.get_process_group_ranks(self.group)
            self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.adopt()

    def leave(self) -> None:
        """Destroy the group if this object created it; keep the caller's group."""
        if self._is_new:
            self.destroy()


def _consolidate(
    source: Path,
    folder: Path,
    file_of: Mapping[str, int] | None,
    num_threads: int,
    group: HostGroup,
) -> dict[str, FileRecord]:
    start = time.monotonic()
    shards = group.run_on_leader(lambda: open_shards(source))
    outputs = {
        name: OutputTensor(dtype_code(shards.stored[name].dtype), shards.stored[name].shape, [])
        for name in sorted(shards.stored, key=natural_key)
    }
    files = lay_out_files(outputs, _group_tensors(outputs, file_of))
    extents = extents_of(files)
    size, rank = group.size, group.rank
    bounds = [len(extents) * r // size for r in range(size + 1)]
    shares = [extents[first:end] for first, end in pairwise(bounds)]
    batch = EXTENTS_PER_ROUND * num_threads
    num_rounds = math.ceil(max(map(len, shares)) / batch)
    buffers = threading.local()
    with Output(folder, files, group) as output, ThreadPoolExecutor(num_threads) as pool:
        output.create(shares[rank])

        def copy(extent: ExtentId) -> None:
            if not hasattr(buffers, "extent"):
                buffers.extent = torch.empty(EXTENT, dtype=torch.uint8)
            data = output.prepare(extent, buffers.extent)
            shards.fill(_reads(files[extent[0]], extent[1], data))
            output.write(extent, data)

        def copy_round(number: int) -> None:
            list(pool.map(copy, shares[rank][number * batch : (number + 1) * batch]))

        try:
            run_in_rounds(group, num_rounds, copy_round)
            records = output.finish()
        except CheckpointError:
            if group.rank == 0:
                output.remove()
            raise
    group.run_on_all(
        lambda: _verify(folder, records, [(files[f].name, k) for f, k in shares[rank]])
    )
    total = sum(file.size for file in files)
    by_rank = [len({file for file, _ in share}) for share in shares]
    listed = ", ".join(map(str, by_rank)) if size <= 8 else f"{min(by_rank)} to {max(by_rank)}"
    num_shards = len({c.file for tensor in shards.stored.values() for c in tensor.chunks})
    logger.info(
        f"Consolidated {num_shards} shard files into {len(files)} files ({total:,} bytes) on "
        f"{size} ranks with {num_threads} threads each in {time.monotonic() - start:.2f} seconds "
        f"(files by rank, some shared: {listed})"
    )
    return records


def _verify(
    folder: Path, records: Mapping[str, FileRecord], extents: Sequence[tuple[str, int]]
) -> None:
    for error in find_damage(folder, records, extents):
        raise error


def _reads(file: FileLayout, number: int, data: Tensor) -> Iterator[Read]:
    """Yield the reads that fill extent `number` of a file. data: its bytes, uint8."""
    start = number * EXTENT
    for entry in file.entries:
        dtype = DTYPES[entry.dtype]
        low, high = max(entry.start, start), min(entry.end, start + len(data))
        if low >= high:
            continue
        values = data[low - start : high - start].view(dtype)
        elements = [(offset - entry.start) // dtype.itemsize for offset in (low, high)]
        for box in rectangles(entry.shape, *elements):
            count = math.prod(sizes_of(box))
            yield Read(entry.name, box, values[:count].view(sizes_of(box)))
            values = values[count:]


def _group_tensors(
    outputs: Mapping[str, OutputTensor], file_of: Mapping[str, int] | None
) -> list[list[str]]:
    if file_of is None:
        return [list(outputs)]
    problems = [
        f"{subject} lacks {len(names)} tensors ({', '.join(names[:5])})"
        for subject, names in (
            ("the mapping", [name for name in outputs if name not in file_of]),
            ("the folder", [name for name in file_of if name not in outputs]),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the mapping and the shards differ: {'; '.join(problems)}. Expected the same names in "
            "both: give the index of this model"
        )
    return group_by_file(outputs, file_of)


def file_numbers(index: Path) -> dict[str, int]:
    """Return the number of each tensor's file in a model.safetensors.index.json, for `consolidate`."""
    files = read_weight_map(index)
    numbers = {file: i for i, file in enumerate(sorted(set(files.values())), start=1)}
    return {name: numbers[file] for name, file in files.items()}
