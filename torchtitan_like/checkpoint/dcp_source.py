"""Read folders of torch's distributed checkpoint (DCP): native steps, and those of other programs.

Both have a `.metadata` with the blocks of each tensor and their bytes. A native step has hashes in
its manifest: `StepSource` verifies every extent, and reads elements directly into their targets.
`DcpSource` loads each block with torch.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.utils import _create_file_view

from torchtitan_like.checkpoint.dcp_metadata import (
    METADATA,
    Chunk,
    DcpMetadata,
    as_checkpoint_error,
    read_metadata,
)
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.source import Read, Source, StoredTensor, reads_by_file
from torchtitan_like.checkpoint.step_folders import Manifest
from torchtitan_like.checkpoint.stored_weights import PREFIX
from torchtitan_like.checkpoint.tensor_archive import HEADER_BYTES
from torchtitan_like.checkpoint.unpickle import load_saved, load_tensor
from torchtitan_like.checkpoint.verification import ExtentSource
from torchtitan_like.util.boxes import (
    crop,
    element_range,
    intersect,
    rectangles,
    relative,
    sizes_of,
    slices,
)
from torchtitan_like.util.extents import EXTENT, FileRecord

MAX_GAP = 4096  # bytes between two tensors that are read along; more than an archive's trailer
S = TypeVar("S", bound="_FolderSource")


class _FolderSource(Source):
    """A folder with a `.metadata`."""

    stored: Mapping[str, StoredTensor]

    def __init__(
        self, path: Path, metadata: DcpMetadata, manifest: Manifest | None, trust: bool
    ) -> None:
        with as_checkpoint_error(path / METADATA):
            stored = {
                name: StoredTensor(entry.shape, getattr(torch, entry.dtype), entry.chunks)
                for name, entry in metadata.tensors.items()
            }
        super().__init__(path, stored, metadata.objects, manifest)
        self.stored = stored
        self._objects = metadata.objects
        self._paths = metadata.paths
        self._trust = trust

    def select(self: S, names: Mapping[str, str]) -> S:
        """Return a source of some tensors only. names: new name -> name in this source."""
        selected = copy.copy(self)
        selected.stored = {name: self.stored[stored_name] for name, stored_name in names.items()}
        selected.object_names, selected._objects, selected._paths = (), {}, {}
        return selected

    def read_all(self) -> Any:
        values = self.read_tensors(self.stored) | self.read_objects(self.object_names)
        state: dict[str, Any] = {}
        for name in dict.fromkeys((*self._paths, *values)):  # in the order of the saved state
            if name in values:
                set_element(state, self._paths.get(name, (name,)), values[name])
        return state

    def _objects_by_file(self, names: Iterable[str]) -> dict[str, list[tuple[str, Chunk]]]:
        by_file: dict[str, list[tuple[str, Chunk]]] = {}
        for name in names:
            chunk = self._objects[name]
            by_file.setdefault(chunk.file, []).append((name, chunk))
        for objects in by_file.values():
            objects.sort(key=lambda each: each[1].start)
        return dict(sorted(by_file.items()))


# ---- native steps


class StepSource(_FolderSource):
    """A native step. `verified` has the extents that were read, by file.

    Verifies every extent before its content is used. The caller checks the sizes of all files.
    trust: unpickle any class. Raises DamagedError, or CheckpointError for a refused class.
    """

    format = "native"

    def __init__(
        self,
        path: Path,
        records: Mapping[str, FileRecord],
        manifest: Manifest | None = None,
        *,
        trust: bool = False,
    ) -> None:
        super().__init__(path, read_metadata(path, records, trust=trust), manifest, trust)
        self.records = records
        self.verified = {METADATA: set(range(len(records[METADATA].extents)))}

    def fill(self, reads: Iterable[Read]) -> None:
        """Read every file that this rank needs once, sequentially."""
        for name, parts in reads_by_file(reads, self.stored).items():
            with self._open(name) as source:
                _read_extents(
                    source, [_locate(c, part, self.stored[part.name].dtype) for c, part in parts]
                )

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        values = {}
        for file, objects in self._objects_by_file(names).items():
            with self._open(file) as source:
                for name, chunk in objects:
                    content = bytearray(chunk.length)
                    source.read(chunk.start, memoryview(content))
                    values[name] = load_saved(io.BytesIO(content), self.path, trust=self._trust)
        return values

    def read_all(self) -> dict[str, Tensor]:
        return self.read_tensors(name for name in self.stored if name.startswith(PREFIX))

    @contextmanager
    def _open(self, name: str) -> Iterator[ExtentSource]:
        if name not in self.records:
            raise DamagedError(
                f"{self.path / name}, which .metadata names, is not recorded in the manifest"
            )
        with ExtentSource(self.path / name, self.records[name]) as source:
            try:
                yield source
            finally:
                self.verified.setdefault(name, set()).update(source.verified)


class _Located(NamedTuple):
    """A read of a chunk, and where its elements are.

    sizes: of the chunk. elements: first byte of the chunk's elements.
    start, end: the bytes of the file that contain the box.
    memory: of the target if it can receive these bytes as they are.
    """

    read: Read
    sizes: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    start: int
    end: int
    memory: memoryview | None

    def put(self, content: memoryview, start: int) -> None:
        """Copy bytes of the file, from byte `start`, to the target. Casts if needed."""
        if self.memory is not None:
            self.memory[start - self.start : start - self.start + len(content)] = content
            return
        values = torch.frombuffer(content, dtype=self.dtype)
        first = (start - self.elements) // self.dtype.itemsize
        for bounds in rectangles(self.sizes, first, first + len(values)):
            sizes = sizes_of(bounds)
            block = values[: math.prod(sizes)].view(sizes)
            values = values[math.prod(sizes) :]
            if indices := intersect(self.read.box, bounds):
                source = relative(crop(self.read.box, indices), bounds)
                self.read.target[slices(indices)].copy_(block[slices(source)])


def _locate(chunk: Chunk, read: Read, dtype: torch.dtype) -> _Located:
    elements = chunk.start + HEADER_BYTES
    first, end = element_range(read.box, chunk.sizes)
    target = read.target
    is_as_stored = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    memory = None
    if is_as_stored and end - first == target.numel():
        memory = target.detach().view(-1).view(torch.uint8).numpy().data
    width = dtype.itemsize
    return _Located(
        read,
        chunk.sizes,
        dtype,
        elements,
        elements + first * width,
        elements + end * width,
        memory,
    )


def _read_extents(source: ExtentSource, reads: Sequence[_Located]) -> None:
    """Fill the targets sequentially. Extents that lie entirely in targets are read in place."""
    by_extent: dict[int, list[_Located]] = {}
    for read in reads:
        for index in range(read.start // EXTENT, -(-read.end // EXTENT)):
            by_extent.setdefault(index, []).append(read)
    for index, extent_reads in sorted(by_extent.items()):
        start, end = source.record.span(index)
        extent_reads.sort(key=lambda read: read.start)
        if (views := _in_place_views(extent_reads, start, end)) is not None:
            source.read_extent(index, views)
            continue
        for read in extent_reads:
            low, high = max(read.start, start), min(read.end, end)
            read.put(source.extent(index)[low - start : high - start], low)


def _in_place_views(reads: Sequence[_Located], start: int, end: int) -> list[memoryview] | None:
    """Return views of the targets' memory for an extent, with scratch memory for the gaps.

    Returns None if the targets do not cover the extent except for gaps of less than MAX_GAP bytes.
    """
    views: list[memoryview] = []
    offset = start
    for read in reads:
        low, high = max(read.start, start), min(read.end, end)
        if read.memory is None or not 0 <= low - offset < MAX_GAP:
            return None
        gap = memoryview(bytearray(low - offset))
        views += [gap, read.memory[low - read.start : high - read.start]]
        offset = high
    return [*views, memoryview(bytearray(end - offset))] if end - offset < MAX_GAP else None


# ---- folders of other programs


class DcpSource(_FolderSource):
    """A DCP folder of another program, such as TorchTitan.

    trust: unpickle any class. Raises CheckpointError for a refused class, DamagedError.
    """

    format = "dcp"

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        if not (path / METADATA).exists():
            raise CheckpointError(
                f"{path} is not a checkpoint of torch.distributed.checkpoint: it has no {METADATA}"
            )
        super().__init__(path, read_metadata(path, trust=trust), None, trust)

    def check(self) -> None:
        """Raise DamagedError if elements have no bytes, or a file is absent or too short."""
        sizes: dict[str, int] = {}
        for name, tensor in self.stored.items():
            # Elements without a chunk would keep their initial values.
            num_stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if num_stored != math.prod(tensor.shape):
                raise DamagedError(
                    f"{self.path / METADATA} lacks chunks of {name} {list(tensor.shape)}"
                )
            for chunk in tensor.chunks:
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), chunk.start + chunk.length)
        for file, size in sizes.items():
            path = self.path / file
            actual_size = path.stat().st_size if path.exists() else 0
            if actual_size < size:
                raise DamagedError(f"{path} has {actual_size} bytes. Expected at least {size}")

    def fill(self, reads: Iterable[Read]) -> None:
        """Load each chunk that this rank needs once, and copy from it to all targets."""
        for file, parts in reads_by_file(reads, self.stored).items():
            with open(self.path / file, "rb") as stream, as_checkpoint_error(self.path):
                for chunk, group in groupby(parts, key=lambda part: part[0]):
                    values = load_tensor(_content(stream, chunk), self.path)
                    if tuple(values.shape) != chunk.sizes:
                        raise ValueError(f"{file} has {list(values.shape)} at {chunk.start}")
                    for _, part in group:
                        part.target.copy_(values[slices(part.box)])

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        values = {}
        for file, objects in self._objects_by_file(names).items():
            with open(self.path / file, "rb") as stream, as_checkpoint_error(self.path):
                for name, chunk in objects:
                    content = io.BytesIO(_content(stream, chunk).read())
                    values[name] = load_saved(content, self.path, trust=self._trust)
        return values


def _content(stream: io.BufferedReader, chunk: Chunk) -> IO[bytes]:
    """Return the bytes of a chunk, without the transforms that torch has applied to them."""
    content: Any = _create_file_view(stream, chunk.start, chunk.length)
    for extension in ExtensionRegistry().from_descriptor_list(chunk.transforms):
        if isinstance(extension, StreamTransformExtension):
            content = extension.transform_from(content)
    return content if content.seekable() else io.BytesIO(content.read())
