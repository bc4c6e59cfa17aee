"""Storage of native steps: torch's distributed checkpoint (DCP) over files in hashed extents.

    dcp.save(state, storage_writer=ExtentWriter(folder, rank), planner=BalancedSavePlanner())

`dcp_source.StepSource` reads it. torch reads such a step too, with its own reader, which does not
verify the hashes.

Each rank with items writes one file, such as `shard-00000.bin`. Items follow each other, aligned to
64 bytes and padded with zeros. A tensor is stored as the archive of `tensor_archive.py`, any other
item as the bytes of the planner, which `torch.save` wrote. `.metadata` is DCP's pickle.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchtitan_like.checkpoint.dcp_metadata import METADATA
from torchtitan_like.checkpoint.tensor_archive import archive_header, archive_trailer
from torchtitan_like.util.extents import EXTENT, ExtentSink, FileRecord, record_of
from torchtitan_like.util.files import sync_path, write_atomically

ALIGNMENT = 64  # bytes; a multiple of all element sizes, so that no element spans two extents
BOUNCE = 4 * EXTENT
SMALL = 4096  # bytes


class BalancedSavePlanner(DefaultSavePlanner):
    """Divides what several ranks hold, so that all ranks write equally many bytes.

    DCP's own planner assigns replicated tensors in their order. A large one at the end then goes to
    a rank that already has its share.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Keep each item on one of its ranks. DCP calls it on rank 0 with the plans of all ranks.

        The largest items come first, each on the rank with the fewest bytes; among equals on the
        last one, because rank 0 also writes `.metadata`. Objects and items below `SMALL` do not
        count. One rank has them all, so that a reader finds them in one file.
        """
        holders: dict[MetadataIndex, list[int]] = defaultdict(list)
        num_bytes: dict[MetadataIndex, int] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders[item.index].append(rank)
                size = item.tensor_storage_size() or 0
                num_bytes[item.index] = size if size >= SMALL else 0
        written = [0] * len(all_plans)
        writers: dict[MetadataIndex, int] = {}
        # Items of a single rank leave no choice, so they come before all others.
        for index in sorted(holders, key=lambda i: (len(holders[i]) > 1, -num_bytes[i])):
            writer = min(holders[index], key=lambda rank: (written[rank], -rank))
            written[writer] += num_bytes[index]
            writers[index] = writer
        plans = [
            replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(plans)


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


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data
