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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.boxes import contiguous_strides
from torchtitan_like.checkpoint.hf.output import Output, run_in_rounds
from torchtitan_like.checkpoint.hf.plan import (
    ExtentCopy,
    ExtentId,
    OutputTensor,
    Overlap,
    ShardInfo,
    extents_of,
    group_by_file,
    lay_out_files,
    merge_shards,
    natural_key,
    plan_copies,
)
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, Entry, read_header
from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Box
from torchtitan_like.util.extents import EXTENT, FileRecord
from torchtitan_like.util.files import naming
from torchtitan_like.util.reading import parse_json

logger = logging.getLogger()

SHARDING_INFO = "DCP_SHARDING_INFO"  # torch's key: {name: {"saved_offsets": [...]}} as JSON
NUM_THREADS = 5
EXTENTS_PER_ROUND = 4  # of each thread, between two checks for failures of other ranks


@dataclass(frozen=True)
class ShardFile:
    """The header of one shard file."""

    path: Path
    entries: dict[str, Entry]
    boxes: dict[str, Box]


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
    shards = group.run_on_leader(lambda: read_shards(source))
    outputs = _plan_tensors(shards)
    files = lay_out_files(outputs, _group_tensors(outputs, file_of))
    extents = extents_of(files)
    size, rank = group.size, group.rank
    bounds = [len(extents) * r // size for r in range(size + 1)]
    shares = [extents[first:end] for first, end in pairwise(bounds)]
    own_extents = set(shares[rank])

    def choose_holder(extent: ExtentId, overlap: Overlap) -> int | None:
        return overlap.holders[0] if extent in own_extents else None

    copies: dict[ExtentId, list[ExtentCopy]] = defaultdict(list)
    for copy in plan_copies(files, outputs, choose_holder):
        copies[copy.extent].append(copy)
    batch = EXTENTS_PER_ROUND * num_threads
    num_rounds = math.ceil(max(map(len, shares)) / batch)
    with (
        Output(folder, files, group) as output,
        _Copier(shards, copies, output, num_threads) as copier,
    ):
        group.run_on_all(copier.open)
        output.create(own_extents)

        def copy_round(number: int) -> None:
            copier.copy(shares[rank][number * batch : (number + 1) * batch])

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
    logger.info(
        f"Consolidated {len(shards)} shard files into {len(files)} files ({total:,} bytes) on "
        f"{size} ranks with {num_threads} threads each in {time.monotonic() - start:.2f} seconds "
        f"(files by rank, some shared: {listed})"
    )
    return records


def _verify(
    folder: Path, records: Mapping[str, FileRecord], extents: Sequence[tuple[str, int]]
) -> None:
    for error in find_damage(folder, records, extents):
        raise error


def _plan_tensors(shards: Sequence[ShardFile]) -> dict[str, OutputTensor]:
    """Return all tensors in the order of the files.

    Raises CheckpointError unless the shards cover each tensor exactly once.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, box in shard.boxes.items():
            ends = tuple(start + count for start, count, _ in box)
            shape = shapes.get(name, ends)
            if len(shape) != len(ends):
                raise CheckpointError(
                    f"{name} has {len(ends)} dimensions in {shard.path}, {len(shape)} in another "
                    "file. Expected the shards of one model: delete the files of the other"
                )
            shapes[name] = tuple(map(max, shape, ends))
    infos = [
        [
            ShardInfo(name, entry.dtype, shapes[name], (shard.boxes[name],))
            for name, entry in shard.entries.items()
        ]
        for shard in shards
    ]
    merged = merge_shards(infos, [str(shard.path) for shard in shards])
    outputs = {}
    for name in sorted(merged, key=natural_key):
        tensor = merged[name]
        for holders in tensor.holders.values():
            if len(holders) > 1 and 0 not in tensor.shape:
                paths = " and ".join(str(shards[holder].path) for holder in holders)
                raise CheckpointError(
                    f"{paths} contain the same part of {name}. Expected each part once: delete "
                    "the files of the other checkpoint"
                )
        overlaps = [
            Overlap(box, holders, (name, box), tuple((0, n, 1) for _, n, _ in box), False)
            for box, holders in tensor.holders.items()
        ]
        if 0 in tensor.shape:
            overlaps = []
        outputs[name] = OutputTensor(tensor.dtype, tensor.shape, overlaps)
    return outputs


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


class _Copier:
    """Copies from shard files into the output, in threads."""

    def __init__(
        self,
        shards: Sequence[ShardFile],
        copies: Mapping[ExtentId, list[ExtentCopy]],
        output: Output,
        num_threads: int,
    ) -> None:
        self._shards = shards
        self._copies = copies
        self._output = output
        self._closing = ExitStack()
        self._files: dict[int, int] = {}
        self._buffers = threading.local()
        self._pool = self._closing.enter_context(ThreadPoolExecutor(num_threads))

    def open(self) -> None:
        """Open every shard file that this rank reads."""
        numbers = {copy.holder for copies in self._copies.values() for copy in copies}
        for number in sorted(numbers):
            self._files[number] = os.open(self._shards[number].path, os.O_RDONLY)
            self._closing.callback(os.close, self._files[number])

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def copy(self, extents: Sequence[ExtentId]) -> None:
        """Fill and write these extents."""
        list(self._pool.map(self._copy, extents))

    def _copy(self, extent: ExtentId) -> None:
        if not hasattr(self._buffers, "extent"):
            self._buffers.extent = torch.empty(EXTENT, dtype=torch.uint8)
            self._buffers.scratch = torch.empty(EXTENT, dtype=torch.uint8)
        data = self._output.prepare(extent, self._buffers.extent)
        for copy in self._copies.get(extent, ()):
            if copy.strides == contiguous_strides(copy.shape):
                self._read(copy, data[copy.offset : copy.offset + copy.nbytes])
            else:
                scratch = self._buffers.scratch[: copy.nbytes]
                self._read(copy, scratch)
                copy.write(data, scratch.view(DTYPES[copy.dtype]).view(copy.shape))
        self._output.write(extent, data)

    def _read(self, copy: ExtentCopy, target: Tensor) -> None:
        """Read the rectangle's bytes.

        They are contiguous in the shard file: an extent contains whole rows or part of one row.
        """
        shard = self._shards[copy.holder]
        entry = shard.entries[copy.shard[0]]
        strides = contiguous_strides(entry.shape)
        first = sum(start * stride for (start, _, _), stride in zip(copy.box, strides, strict=True))
        offset = entry.start + first * DTYPES[entry.dtype].itemsize
        view = target.numpy().data
        with naming(shard.path):
            while view:
                count = os.preadv(self._files[copy.holder], [view], offset)
                if count == 0:
                    raise DamagedError(
                        f"{shard.path} ends at byte {offset}, in the middle of {entry.name}. "
                        "Expected the whole tensor: copy the file again"
                    )
                offset, view = offset + count, view[count:]


def read_shards(folder: Path) -> list[ShardFile]:
    """Read the headers of all shard files in a folder.

    Raises CheckpointError if a file is missing or is not a shard file, DamagedError if damaged.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{folder} contains no *.safetensors files. Expected the shards of a distributed "
            "checkpoint: give their folder"
        )
    names = [path.name.split("-") for path in paths]
    numbers = {int(name[1]) for name in names if name[0] == "shard" and name[1].isdigit()}
    if gap := sorted(set(range(1, max(numbers, default=0) + 1)) - numbers):
        raise CheckpointError(
            f"{folder} lacks the file of shard {gap[0]}. Expected shards 1 to {max(numbers)}: copy "
            "the missing file"
        )
    return [_read_shard(path) for path in paths]


def _read_shard(path: Path) -> ShardFile:
    header, metadata = read_header(path)
    entries = {entry.name: entry for entry in header}
    if SHARDING_INFO not in metadata:
        raise CheckpointError(
            f"{path} is not a shard file: its metadata lacks {SHARDING_INFO}. Expected files that "
            "torch's HuggingFaceStorageWriter wrote with save_distributed=True: remove other files"
        )
    try:
        offsets = {
            name: tuple(info["saved_offsets"])
            for name, info in parse_json(metadata[SHARDING_INFO]).items()
        }
        boxes = {
            name: tuple(
                (start, count, 1) for start, count in zip(offsets[name], entry.shape, strict=True)
            )
            for name, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path}: {SHARDING_INFO} does not match its tensors ({type(error).__name__} {error}). "
            "Expected the offsets of every tensor: copy the file again"
        ) from error
    return ShardFile(path, entries, boxes)
