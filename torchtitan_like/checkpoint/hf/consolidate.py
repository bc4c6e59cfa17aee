"""Shards into whole safetensors files, by every rank of a group: shards of torch's HuggingFaceStorageWriter, or ours.

A shard file holds for each tensor one rectangle; metadata says where it begins. All is checked before a byte is
written: every tensor is covered exactly once, and the mapping names all of them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.extents import EXTENT, FileRecord, find_damage, naming
from torchtitan_like.checkpoint.hf.output import Output, in_rounds
from torchtitan_like.checkpoint.hf.plan import (
    ExtentId,
    Held,
    Key,
    Move,
    Part,
    Target,
    contiguous,
    extents_of,
    group_by,
    lay_out_all,
    merge,
    moves,
    natural,
)
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, Entry, lay_out, read_header
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Box, slices
from torchtitan_like.util.reading import parse_json

logger = logging.getLogger()

SHARDING = "DCP_SHARDING_INFO"  # torch's key: {name: {"saved_offsets": [...]}} as JSON
SHAPES = "full_shapes"  # ours: {name: shape} as JSON, by which a missing last shard is noticed
NUM_THREADS = 5
ROUND = 4  # extents for each thread between two looks at whether another rank has failed


@dataclass(frozen=True)
class ShardFile:
    """What one file of shards says of itself."""

    path: Path
    entries: dict[str, Entry]
    boxes: dict[str, Box]
    shapes: dict[str, tuple[int, ...]]  # full ones; empty when the file does not tell


def consolidate(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = NUM_THREADS,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Make whole files of all shards in `input_dir`, in `output_dir`, which every rank of the group must see.

    fqn_to_index_mapping    name -> number of its output file; None: one file. It names exactly the tensors there are
    num_threads             copying at a time on each rank
    process_group           who shares the work, by bytes; None: the default group, or this process alone without one

    The bytes are those of a direct export, for any number of ranks; what was written is read back and compared. Returns
    the records of all files on every rank. Raises CheckpointError on all of them, before anything is written when
    shards are missing, overlap or do not fit the mapping. Shards of torch do not tell how large a tensor is: that the
    last ones are missing shows only when it leaves a hole.
    """
    if num_threads < 1:
        raise CheckpointError(f"num_threads = {num_threads}: expected at least 1")
    group = _Members(process_group)
    try:
        return consolidate_together(Path(input_dir), Path(output_dir), fqn_to_index_mapping, num_threads, Votes(group))
    finally:
        group.leave()


class _Members(HostGroup):
    """The ranks of somebody else's process group, or of a gloo group like it where that one needs a GPU."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.size = 1 if group is None else group.size()
        self.group = group if self.size > 1 else None
        self._made = self.group is not None and torch.device("cpu") not in self.group._device_types
        if self._made:
            ranks = dist.get_process_group_ranks(self.group)
            self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.adopt()

    def leave(self) -> None:
        """End what was made here; the caller's own group stays."""
        if self._made:
            self.destroy()


def consolidate_together(
    source: Path, folder: Path, numbers: Mapping[str, int] | None, num_threads: int, votes: Votes
) -> dict[str, FileRecord]:
    """As `consolidate`, among the ranks of `votes`."""
    begin = time.monotonic()
    shards = votes.leader_does(lambda: read_shards(source))
    found = _targets(shards)
    files = lay_out_all(found, _groups(found, numbers))
    extents = extents_of(files)
    size, rank = votes.group.size, votes.group.rank
    shares = [extents[len(extents) * r // size : len(extents) * (r + 1) // size] for r in range(size)]
    mine = set(shares[rank])
    into: dict[ExtentId, list[Move]] = defaultdict(list)
    for move in moves(files, found, lambda extent, part: part.holders[0] if extent in mine else None):
        into[move.extent].append(move)
    batch = ROUND * num_threads
    turns = math.ceil(max(map(len, shares)) / batch)
    with Output(folder, files, votes) as output, _Copier(shards, into, output, num_threads) as copier:
        votes.all_do(copier.open)
        output.create(mine)
        try:
            in_rounds(votes, turns, lambda turn: copier.copy(shares[rank][turn * batch : (turn + 1) * batch]))
            records = output.finish()
        except CheckpointError:
            if votes.is_leader:
                output.remove()
            raise
    votes.all_do(lambda: _read_back(folder, records, [(files[f].name, k) for f, k in shares[rank]]))
    total = sum(file.size for file in files)
    logger.info(
        f"Consolidated {len(shards)} files of shards into {len(files)} ({total:,} bytes) on {size} ranks with "
        f"{num_threads} threads each in {time.monotonic() - begin:.2f} seconds"
    )
    return records


def _read_back(folder: Path, records: Mapping[str, FileRecord], extents: Sequence[tuple[str, int]]) -> None:
    for error in find_damage(folder, records, extents):
        raise error


def _targets(shards: Sequence[ShardFile]) -> dict[str, Target]:
    """All tensors, in the order in which they are written. Raises CheckpointError unless each is there exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, box in shard.boxes.items():
            ends = shard.shapes.get(name, tuple(start + count for start, count, _ in box))
            known = shapes.get(name, ends)
            if len(known) != len(ends):
                raise CheckpointError(
                    f"{name} has {len(ends)} dimensions in {shard.path}, {len(known)} in another file"
                )
            shapes[name] = tuple(map(max, known, ends))
    told = [
        [Held(name, entry.dtype, shapes[name], (shard.boxes[name],)) for name, entry in shard.entries.items()]
        for shard in shards
    ]
    merged = merge(told, [str(shard.path) for shard in shards])
    found = {}
    for name in sorted(merged, key=natural):
        first, boxes = merged[name]
        for holders in boxes.values():
            if len(holders) > 1 and 0 not in first.shape:
                places = " and ".join(str(shards[holder].path) for holder in holders)
                raise CheckpointError(
                    f"{name}: {places} hold the same part of it. Remove what is left from another save"
                )
        parts = [Part(box, holders, (name, box), _whole(box), False) for box, holders in boxes.items()]
        found[name] = Target(first.dtype, first.shape, [] if 0 in first.shape else parts)
    return found


def _whole(box: Box) -> Box:
    return tuple((0, count, 1) for _, count, _ in box)


def _groups(found: Mapping[str, Target], numbers: Mapping[str, int] | None) -> list[list[str]]:
    if numbers is None:
        return [list(found)]
    problems = [
        f"{what} {len(names)} tensors ({', '.join(names[:5])})"
        for what, names in (
            ("it lacks", [name for name in found if name not in numbers]),
            ("the shards lack", [name for name in numbers if name not in found]),
        )
        if names
    ]
    if problems:
        raise CheckpointError("the mapping does not belong to these shards: " + "; ".join(problems))
    return group_by(found, numbers)


class _Copier:
    """Copies moves from files of shards into the output, in threads."""

    def __init__(
        self, shards: Sequence[ShardFile], into: Mapping[ExtentId, list[Move]], output: Output, num_threads: int
    ) -> None:
        self._shards, self._into, self._output = shards, into, output
        self._closing = ExitStack()
        self._files: dict[int, int] = {}
        self._buffers = threading.local()
        self._pool = self._closing.enter_context(ThreadPoolExecutor(num_threads))

    def open(self) -> None:
        """Open every file that something is copied from."""
        for number in sorted({move.holder for found in self._into.values() for move in found}):
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
        data = self._output.begin(extent, self._buffers.extent)
        for move in self._into.get(extent, ()):
            if move.strides == contiguous(move.shape):
                self._read(move, data[move.offset : move.offset + move.nbytes])
            else:
                scratch = self._buffers.scratch[: move.nbytes]
                self._read(move, scratch)
                move.put(data, scratch.view(DTYPES[move.dtype]).view(move.shape))
        self._output.write(extent, data)

    def _read(self, move: Move, into: Tensor) -> None:
        """The rectangle's bytes, which stand side by side: an extent takes whole rows of a shard, or a part of one."""
        shard = self._shards[move.holder]
        entry = shard.entries[move.key[0]]
        strides = contiguous(entry.shape)
        first = sum(start * stride for (start, _, _), stride in zip(move.box, strides, strict=True))
        offset = entry.begin + first * DTYPES[entry.dtype].itemsize
        view = into.numpy().data
        with naming(shard.path):
            while view:
                count = os.preadv(self._files[move.holder], [view], offset)
                if count == 0:
                    raise DamagedError(f"{shard.path} ends at byte {offset}, in the middle of {entry.name}")
                offset, view = offset + count, view[count:]


def read_shards(folder: Path) -> list[ShardFile]:
    """The headers of all files of shards in a folder. Raises CheckpointError when one is missing, DamagedError."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} holds no *.safetensors files: expected the shards of a distributed save")
    numbers = {int(part[1]) for path in paths if (part := path.name.split("-"))[0] == "shard" and part[1].isdigit()}
    if gap := sorted(set(range(1, max(numbers, default=0) + 1)) - numbers):
        raise CheckpointError(
            f"{folder} holds no file of shard {gap[0]}, but one of shard {max(numbers)}: it is missing"
        )
    return [_read_shard(path) for path in paths]


def _read_shard(path: Path) -> ShardFile:
    found, metadata = read_header(path)
    entries = {entry.name: entry for entry in found}
    if SHARDING not in metadata:
        raise CheckpointError(f"{path} is no file of shards: its metadata lacks {SHARDING}")
    try:
        offsets = {name: tuple(info["saved_offsets"]) for name, info in parse_json(metadata[SHARDING]).items()}
        shapes = {name: tuple(shape) for name, shape in parse_json(metadata.get(SHAPES, "{}")).items()}
        boxes = {
            name: tuple((start, count, 1) for start, count in zip(offsets[name], entry.shape, strict=True))
            for name, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: {SHARDING} does not fit its tensors: {type(error).__name__} {error}") from error
    return ShardFile(path, entries, boxes, shapes)


def write_shards(folder: Path, found: Mapping[str, Target], views: Mapping[Key, Tensor], votes: Votes) -> None:
    """Every rank writes its rectangles of `found` into files of its own, replicas one of them; all ranks together.

    The format is that of torch's HuggingFaceStorageWriter(save_distributed=True). Raises CheckpointError on all ranks.
    """
    rank, loads = votes.group.rank, Counter[int]()
    files: list[dict[str, Part | None]] = []  # one rectangle of a tensor a file
    for name, target in found.items():
        parts: Sequence[Part | None] = target.parts or [None]
        for part in parts:
            if part is not None and any(step != 1 for _, count, step in part.box if count > 1):
                raise CheckpointError(
                    f"{name} is interleaved, which shards cannot express: export with executor direct"
                )
            giver = min(part.holders, key=lambda holder: (loads[holder], holder)) if part is not None else 0
            loads[giver] += math.prod(count for _, count, _ in part.box) if part is not None else 0
            if giver == rank:
                room = next((file for file in files if name not in file), None)
                if room is None:
                    files.append(room := {})
                room[name] = part
    votes.leader_does(lambda: folder.mkdir(parents=True))

    def write() -> None:
        for i, file in enumerate(files, start=1):
            name = f"shard-{rank + 1:05d}-model-{i:05d}-of-{len(files):05d}.safetensors"
            _write_shard(folder / name, file, found, views)

    votes.all_do(write)


def _write_shard(
    path: Path, parts: Mapping[str, Part | None], found: Mapping[str, Target], views: Mapping[Key, Tensor]
) -> None:
    boxes = {name: part.box if part else tuple((0, n, 1) for n in found[name].shape) for name, part in parts.items()}
    offsets = {name: {"saved_offsets": [start for start, _, _ in box]} for name, box in boxes.items()}
    shapes = {name: found[name].shape for name in parts}
    metadata = {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", SHAPES: json.dumps(shapes)}
    layout = lay_out(
        path.name, [(name, found[name].dtype, tuple(n for _, n, _ in box)) for name, box in boxes.items()], metadata
    )
    with naming(path), open(path, "xb") as file:  # not synced: shards do not outlive the export
        file.write(layout.header)
        for entry in layout.entries:
            part = parts[entry.name]
            values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            if part is not None:
                view = views[part.key][slices(part.local)]
                values.copy_((view.mT if part.transposed else view).reshape(entry.shape))
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
