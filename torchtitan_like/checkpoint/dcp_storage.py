"""Native steps: torch's distributed checkpoint (DCP), with its standard planners, over files in hashed extents.

    dcp.save(state, storage_writer=ExtentWriter(folder, rank), process_group=group)
    load_planned(state, ExtentReader(folder, records), CheckedPlanner(folder))

Every rank that has something to write writes one file, `shard-00000.bin`: its items one after the other, each from a
multiple of 64 bytes on, padded with zeros; a tensor is its elements in C order, anything else the planner's own bytes.
`.metadata` is DCP's pickle; where it says how an item is stored stands (file name, offset, length in bytes).
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.extents import (
    EXTENT,
    ExtentSink,
    ExtentSource,
    FileRecord,
    all_extents,
    check_sizes,
    find_damage,
    naming,
    record_of,
)
from torchtitan_like.checkpoint.hf.boxes import contiguous_strides, rectangles
from torchtitan_like.checkpoint.unpickle import load_metadata
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.files import sync_path, write_atomically

METADATA = ".metadata"
ALIGNMENT = (
    64  # bytes; a multiple of every element's size, so that no extent ends within an element
)
BOUNCE = 4 * EXTENT


class ExtentWriter(StorageWriter):
    """Writes one step into `folder`, which exists and is new.

    After `dcp.save` `records` holds what this rank has written: its shard, if it had anything to write, and on rank 0
    `.metadata`. Tensors in host memory are written from where they are; others pass through a buffer of a few extents.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.folder = Path(folder)
        self.shard = f"shard-{rank:05d}.bin"
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.records = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items in the plan's order: the same state gives the same bytes."""
        results = []
        if plan.items:
            with ExtentSink(self.folder / self.shard) as sink:
                bounce = _Bounce()
                results = [self._write_item(sink, item, planner, bounce) for item in plan.items]
                self.records[self.shard] = sink.close()
            sync_path(self.folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_item(
        self, sink: ExtentSink, item: WriteItem, planner: SavePlanner, bounce: _Bounce
    ) -> WriteResult:
        sink.write(bytes(-sink.size % ALIGNMENT))
        begin = sink.size
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            for piece in bounce.pieces(data.detach()):
                sink.write(piece)
        else:
            sink.write(data.getbuffer())
        length = sink.size - begin
        return WriteResult(item.index, length, (self.shard, begin, length))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` durably, last; called on rank 0 when every rank has written its shard."""
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(
                entry, TensorStorageMetadata
            ):  # the same text from live and from staged (pinned) tensors
                properties = TensorProperties(dtype=entry.properties.dtype)
                metadata.state_dict_metadata[name] = replace(entry, properties=properties)
        temporary, content = self.folder / f"{METADATA}.tmp", pickle.dumps(metadata)
        with naming(temporary):
            write_atomically(self.folder / METADATA, content, temporary)
        self.records[METADATA] = record_of(content)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # one is made for each save; DCP never reuses it for another folder


class _Bounce:
    """Turns tensors into the bytes of their elements, C order, through a host buffer where they cannot be used as is."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in order; each piece is valid until the next is asked for."""
        if tensor.numel() == 0:
            return
        if tensor.is_cpu and tensor.is_contiguous():
            yield _as_bytes(tensor)
        elif tensor.nbytes <= BOUNCE:
            if self._buffer is None:
                self._buffer = torch.empty(BOUNCE, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            staged = self._buffer[: tensor.nbytes]
            staged.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            yield _as_bytes(staged)
        else:
            rows = BOUNCE // tensor[0].nbytes
            for part in tensor.split(rows) if rows else tensor.unbind():
                yield from self.pieces(part)


class ExtentReader(StorageReader):
    """Reads a step written by ExtentWriter, straight into the state's own tensors.

    Every extent is verified against `records` before what it holds is used; `verified` tells which ones were read.
    Nothing is read before every file is known to have its recorded size. trust: unpickle any class.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        records: Mapping[str, FileRecord],
        *,
        trust: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.records = records
        self.trust = trust
        self.verified: dict[str, set[int]] = {}
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """What the step holds. Raises DamagedError, or CheckpointError for a class that is refused.

        To be called before `dcp.load` too, which makes a mere text of what is raised in here.
        """
        if self._metadata is None:
            content = bytearray(self._record(METADATA).size)
            check_sizes(self.folder, {METADATA: self.records[METADATA]})
            with self._source(METADATA) as source:
                source.read(0, memoryview(content))
            self._metadata = load_metadata(content, self.folder / METADATA, trust=self.trust)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Check that the files are there (rank 0: all of them). Raises DamagedError."""
        if is_coordinator:
            check_sizes(self.folder, self.records)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.verified = {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every file this rank needs once, from front to back."""
        stored = self.read_metadata().storage_data
        by_file: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            name, offset, length = stored[item.storage_index]
            by_file.setdefault(name, []).append((offset, length, item))
        for name, items in sorted(by_file.items()):
            items.sort(key=lambda entry: entry[0])
            tensors = [
                (offset, item) for offset, _, item in items if item.type != LoadItemType.BYTE_IO
            ]
            targets = [planner.resolve_tensor(item).detach() for _, item in tensors]
            boxes = [
                self._box(offset, item, target)
                for (offset, item), target in zip(tensors, targets, strict=True)
            ]
            with self._source(name) as source:
                for offset, length, item in items:
                    if item.type == LoadItemType.BYTE_IO:
                        content = bytearray(length)
                        source.read(offset, memoryview(content))
                        planner.load_bytes(item, io.BytesIO(content))
                _read_boxes(source, [box for box in boxes if box is not None])
            for (_, item), target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _box(self, offset: int, item: ReadItem, target: torch.Tensor) -> _Box | None:
        """The item's box of the stored tensor, which begins at byte `offset`; None for one without elements."""
        if not target.numel():
            return None
        entry = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata) and item.storage_index.index is not None
        stored = entry.chunks[item.storage_index.index].sizes
        return _Box(
            offset, entry.properties.dtype, stored, item.storage_offsets, item.lengths, target
        )

    def _record(self, name: str) -> FileRecord:
        if name not in self.records:
            raise DamagedError(
                f"{self.folder / name} is not among the files recorded in the manifest"
            )
        return self.records[name]

    @contextmanager
    def _source(self, name: str) -> Iterator[ExtentSource]:
        with ExtentSource(self.folder / name, self._record(name)) as source:
            try:
                yield source
            finally:
                self.verified.setdefault(name, set()).update(source.verified)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # made for one folder, with its records


def load_planned(state: dict[str, Any], reader: StorageReader, planner: LoadPlanner) -> None:
    """What `dcp.load` does, on this rank alone: its planner cuts every rank's reads by the metadata, and asks no other rank.

    So nothing is gathered, and an error is raised as it is, on the rank that met it: callers vote. `state` is flat, or empty.
    """
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Box:
    """A box of a stored tensor and the tensor that receives it, filled from stretches of the stored elements."""

    def __init__(
        self,
        offset: int,
        dtype: torch.dtype,
        stored: tuple[int, ...],
        starts: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        self.stored, self.starts, self.lengths, self.target, self.dtype = (
            stored,
            starts,
            lengths,
            target,
            dtype,
        )
        strides = contiguous_strides(stored)
        # The stretch of stored elements, in C order, from the box's first to its last; and of bytes in the file.
        self.first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        self.offset = offset
        self.begin = offset + self.first * dtype.itemsize
        self.end = offset + (self.first + last + 1) * dtype.itemsize
        # The target as such a stretch itself, where both are without gaps: rows, or all, of the stored tensor.
        is_gapless = last + 1 == target.numel() and target.is_contiguous()
        self.flat = target.view(-1) if is_gapless else None
        self.bytes = (
            _as_bytes(self.flat)
            if self.flat is not None and target.is_cpu and target.dtype == dtype
            else None
        )

    def put_bytes(self, content: memoryview, at: int) -> None:
        """Copy what belongs to the box of stored bytes; `at`: where in the file they begin. Casts where needed."""
        self.put(
            torch.frombuffer(content, dtype=self.dtype), (at - self.offset) // self.dtype.itemsize
        )

    def put(self, elements: torch.Tensor, first: int) -> None:
        """Copy what belongs to the box of `elements` (n,), the stored ones from number `first` on."""
        if self.flat is not None:
            self.flat[first - self.first : first - self.first + len(elements)].copy_(elements)
            return
        for bounds in rectangles(self.stored, first, first + len(elements)):
            sizes = [stop - start for start, stop in bounds]
            part, elements = elements[: math.prod(sizes)].view(sizes), elements[math.prod(sizes) :]
            here, there = [], []
            for (start, stop), begin, length in zip(bounds, self.starts, self.lengths, strict=True):
                low, high = max(start, begin), min(stop, begin + length)
                here.append(slice(low - start, max(low, high) - start))
                there.append(slice(low - begin, max(low, high) - begin))
            self.target[tuple(there)].copy_(part[tuple(here)])


def _read_boxes(source: ExtentSource, boxes: Sequence[_Box]) -> None:
    """Fill `boxes`, from front to back; an extent that belongs to them as a whole is read where it shall be."""
    by_extent: dict[int, list[_Box]] = {}
    for box in boxes:
        for index in range(box.begin // EXTENT, -(-box.end // EXTENT)):
            by_extent.setdefault(index, []).append(box)
    for index, found in sorted(by_extent.items()):
        begin, end = source.record.span(index)
        if (views := _in_place(found, begin, end)) is not None:
            source.read_extent(index, views)
            continue
        for box in found:
            low, high = max(box.begin, begin), min(box.end, end)
            box.put_bytes(source.extent(index)[low - begin : high - begin], low)


def _in_place(boxes: Sequence[_Box], begin: int, end: int) -> list[memoryview] | None:
    """The memory of an extent's boxes, and some for the padding between them; None where they do not fill it so."""
    views: list[memoryview] = []
    at = begin
    for box in boxes:
        low, high = max(box.begin, begin), min(box.end, end)
        if box.bytes is None or not 0 <= low - at < ALIGNMENT:
            return None
        views += [memoryview(bytearray(low - at)), box.bytes[low - box.begin : high - box.begin]]
        at = high
    return [*views, memoryview(bytearray(end - at))] if end - at < ALIGNMENT else None


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def verify_rest(
    folder: Path,
    records: Mapping[str, FileRecord],
    verified: Mapping[str, set[int]],
    group: HostGroup,
) -> None:
    """Verify what no rank has read, split over the ranks, which call this together; `verified`: what this one has.

    Raises DamagedError on the rank that finds damage.
    """
    seen = {
        (name, index)
        for mine in group.gather_objects(verified)
        for name in mine
        for index in mine[name]
    }
    rest = [extent for extent in all_extents(records) if extent not in seen]
    rank = group.rank
    mine = rest[len(rest) * rank // group.size : len(rest) * (rank + 1) // group.size]
    for error in find_damage(folder, records, mine):
        raise error


def unwrap(problem: CheckpointException) -> CheckpointError:
    """DCP's error as ours, with every failed rank's words: DamagedError when any rank has found damage."""
    texts, damaged = [], False
    for rank, (error, _) in problem.failures.items():
        damaged |= isinstance(error, DamagedError)
        text = (
            str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        )
        texts.append(f"rank {rank}: {text}")
    return (DamagedError if damaged else CheckpointError)("; ".join(texts))
