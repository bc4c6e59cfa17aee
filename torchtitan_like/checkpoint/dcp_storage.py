"""Storage of native steps: torch's distributed checkpoint (DCP) over files in hashed extents.

    dcp.save(state, storage_writer=ExtentWriter(folder, rank), process_group=group)
    load_planned(state, ExtentReader(folder, records), CheckedPlanner(folder))

torch reads such a step too, with its own reader, which does not verify the hashes.

Each rank with items writes one file, such as `shard-00000.bin`. Items follow each other, aligned to
64 bytes and padded with zeros. A tensor is stored as the archive of `tensor_archive.py`, any other
item as the bytes of the planner, which `torch.save` wrote. `.metadata` is DCP's pickle.
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

from torchtitan_like.checkpoint.dcp_metadata import METADATA
from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.checkpoint.hf.boxes import contiguous_strides, rectangles
from torchtitan_like.checkpoint.tensor_archive import HEADER_BYTES, archive_header, archive_trailer
from torchtitan_like.checkpoint.unpickle import load_metadata
from torchtitan_like.checkpoint.verification import ExtentSource, check_sizes
from torchtitan_like.util.extents import EXTENT, ExtentSink, FileRecord, record_of
from torchtitan_like.util.files import sync_path, write_atomically

ALIGNMENT = 64  # bytes; a multiple of all element sizes, so that no element spans two extents
MAX_GAP = 4096  # bytes between two tensors that are read along; more than an archive's trailer
BOUNCE = 4 * EXTENT


class ExtentWriter(StorageWriter):
    """Writes one step into `folder`, which must be new and empty.

    After `dcp.save`, `records` contains the files of this rank: its shard, if it has items, and on
    rank 0 `.metadata`. Tensors in host memory are written without a copy. Others pass through a
    buffer of a few extents.
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
        """Write the items in the order of the plan, so that equal states give equal files."""
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
        offset = sink.size
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            sink.write(archive_header(data.nbytes))
            for piece in bounce.pieces(data.detach()):
                sink.write(piece)
            sink.write(archive_trailer(data.dtype, data.shape))
        else:
            sink.write(data.getbuffer())
        length = sink.size - offset
        return WriteResult(item.index, length, _StorageInfo(self.shard, offset, length))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` durably. DCP calls it on rank 0 after all ranks have written."""
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(
                entry, TensorStorageMetadata
            ):  # the same text from live and from staged (pinned) tensors
                properties = TensorProperties(dtype=entry.properties.dtype)
                metadata.state_dict_metadata[name] = replace(entry, properties=properties)
        content = pickle.dumps(metadata)
        write_atomically(self.folder / METADATA, content, self.folder / f"{METADATA}.tmp")
        self.records[METADATA] = record_of(content)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # DCP must not reuse the writer for another folder


class _Bounce:
    """Converts tensors to bytes in C order. Uses a host buffer unless contiguous on the CPU."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order. Each piece is valid until the next one."""
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
            for block in tensor.split(rows) if rows else tensor.unbind():
                yield from self.pieces(block)


class ExtentReader(StorageReader):
    """Reads a step of `ExtentWriter` directly into the tensors of the state.

    Verifies every extent against `records` before its content is used. `verified` contains the
    extents that were read. Checks the sizes of all files first. trust: unpickle any class.
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
        """Return the metadata. Raises DamagedError, or CheckpointError for a refused class.

        Call it before `dcp.load`, which would convert these errors to text.
        """
        if self._metadata is None:
            content = bytearray(self._record(METADATA).size)
            check_sizes(self.folder, {METADATA: self.records[METADATA]})
            with self._source(METADATA) as source:
                source.read(0, memoryview(content))
            self._metadata = load_metadata(content, self.folder / METADATA, trust=self.trust)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Check the sizes of all files on the coordinator. Raises DamagedError."""
        if is_coordinator:
            check_sizes(self.folder, self.records)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.verified = {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every file that this rank needs once, sequentially."""
        stored = self.read_metadata().storage_data
        by_file: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            storage = stored[item.storage_index]
            # The content of a tensor starts with its elements.
            skipped = 0 if item.type == LoadItemType.BYTE_IO else HEADER_BYTES
            entry = (storage.offset + skipped, storage.length - skipped, item)
            by_file.setdefault(storage.relative_path, []).append(entry)
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
        """Return the item's box of the tensor with elements at `offset`, or None if it is empty."""
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
                f"{self.folder / name} is not recorded in the manifest. Expected a record, because "
                "the .metadata refers to the file: copy the step again"
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
        return False  # DCP must not reuse the reader for another folder


def load_planned(state: dict[str, Any], reader: StorageReader, planner: LoadPlanner) -> None:
    """Load `state` like `dcp.load`, but without collectives. `state` must be flat or empty.

    The planner needs only the metadata, so nothing is gathered. An error is raised only on the rank
    where it occurs. Callers must share it, for example with `HostGroup.run_on_all`.
    """
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Box:
    """A box of a stored tensor, and the target tensor that receives its elements."""

    def __init__(
        self,
        offset: int,
        dtype: torch.dtype,
        stored: tuple[int, ...],
        starts: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        self.stored = stored
        self.starts = starts
        self.lengths = lengths
        self.target = target
        self.dtype = dtype
        strides = contiguous_strides(stored)
        # The range of stored elements in C order from the box's first to its last, and its bytes.
        self.first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        self.offset = offset
        self.start = offset + self.first * dtype.itemsize
        self.end = offset + (self.first + last + 1) * dtype.itemsize
        # A flat view of the target if the box is contiguous in the file and in the target.
        is_contiguous = last + 1 == target.numel() and target.is_contiguous()
        self.flat = target.view(-1) if is_contiguous else None
        self.bytes = (
            _as_bytes(self.flat)
            if self.flat is not None and target.is_cpu and target.dtype == dtype
            else None
        )

    def put_bytes(self, content: memoryview, offset: int) -> None:
        """Copy the box's elements from bytes at `offset` in the file. Casts if needed."""
        elements = torch.frombuffer(content, dtype=self.dtype)
        self.put(elements, (offset - self.offset) // self.dtype.itemsize)

    def put(self, elements: torch.Tensor, first: int) -> None:
        """Copy the box's elements from `elements` (n,), which start at stored element `first`."""
        if self.flat is not None:
            self.flat[first - self.first : first - self.first + len(elements)].copy_(elements)
            return
        for bounds in rectangles(self.stored, first, first + len(elements)):
            sizes = [stop - start for start, stop in bounds]
            block = elements[: math.prod(sizes)].view(sizes)
            elements = elements[math.prod(sizes) :]
            source_slices = []
            target_slices = []
            for (start, stop), box_start, length in zip(
                bounds, self.starts, self.lengths, strict=True
            ):
                low = max(start, box_start)
                high = max(low, min(stop, box_start + length))
                source_slices.append(slice(low - start, high - start))
                target_slices.append(slice(low - box_start, high - box_start))
            self.target[tuple(target_slices)].copy_(block[tuple(source_slices)])


def _read_boxes(source: ExtentSource, boxes: Sequence[_Box]) -> None:
    """Fill `boxes` sequentially. Extents that lie entirely in boxes are read in place."""
    by_extent: dict[int, list[_Box]] = {}
    for box in boxes:
        for index in range(box.start // EXTENT, -(-box.end // EXTENT)):
            by_extent.setdefault(index, []).append(box)
    for index, extent_boxes in sorted(by_extent.items()):
        start, end = source.record.span(index)
        if (views := _in_place_views(extent_boxes, start, end)) is not None:
            source.read_extent(index, views)
            continue
        for box in extent_boxes:
            low, high = max(box.start, start), min(box.end, end)
            box.put_bytes(source.extent(index)[low - start : high - start], low)


def _in_place_views(boxes: Sequence[_Box], start: int, end: int) -> list[memoryview] | None:
    """Return views of the boxes' memory for an extent, with scratch memory for the gaps.

    Returns None if the boxes do not cover the extent except for gaps of less than MAX_GAP bytes.
    """
    views: list[memoryview] = []
    offset = start
    for box in boxes:
        low, high = max(box.start, start), min(box.end, end)
        if box.bytes is None or not 0 <= low - offset < MAX_GAP:
            return None
        gap = memoryview(bytearray(low - offset))
        views += [gap, box.bytes[low - box.start : high - box.start]]
        offset = high
    return [*views, memoryview(bytearray(end - offset))] if end - offset < MAX_GAP else None


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data
