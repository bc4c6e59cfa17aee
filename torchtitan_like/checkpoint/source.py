"""Stored tensors of any format, and how to read boxes of them into a rank's memory.

Each format has one `Source`: a native step and a foreign DCP folder (`dcp_source.py`), safetensors
(`hf/safetensors_source.py`), and files of `torch.save` (`pth_source.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_like.checkpoint.dcp_metadata import Chunk
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.start import Format
from torchtitan_like.checkpoint.step_folders import Manifest
from torchtitan_like.util.boxes import Box, Shape, box_at, crop, intersect, relative, slices
from torchtitan_like.util.shards import local_boxes


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a full tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """A tensor in files."""

    chunks: tuple[Chunk, ...]


class Read(NamedTuple):
    """Copy `box` of the stored tensor `name` into `target`, a view of this rank's memory."""

    name: str
    box: Box
    target: Tensor

    def part(self, indices: Box) -> Read:
        """Return the read of the box's elements with these indices."""
        return Read(self.name, crop(self.box, indices), self.target[slices(indices)])

    def within(self, bounds: Box) -> Read | None:
        """Return the part in a block of the tensor, relative to the block; None if there is none."""
        indices = intersect(self.box, bounds)
        if indices is None:
            return None
        part = self.part(indices)
        return part._replace(box=relative(part.box, bounds))


class Source:
    """The stored tensors and objects of a checkpoint, by name.

    manifest: of a folder that this program wrote, else empty.
    """

    format: ClassVar[Format]

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, TensorInfo],
        object_names: Iterable[str] = (),
        manifest: Manifest | None = None,
    ) -> None:
        self.path = path
        self.stored = stored
        self.object_names = tuple(object_names)
        self.manifest = manifest or {}

    def fill(self, reads: Iterable[Read]) -> None:
        """Copy the box of each read into its target. Raises DamagedError if bytes are missing."""
        raise NotImplementedError

    def fill_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Fill this rank's shards of tensors, by stored name."""
        self.fill(
            Read(name, box, view)
            for name, tensor in tensors.items()
            for box, view in local_boxes(tensor)
        )

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Return entries that are not tensors."""
        raise NotImplementedError

    def read_tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors, in their stored dtypes."""
        infos = {name: self.stored[name] for name in names}
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        self.fill_tensors(tensors)
        return tensors

    def read(self, name: str) -> Any:
        """Return one tensor or object."""
        if name in self.stored:
            return self.read_tensors([name])[name]
        return self.read_objects([name])[name]

    def read_all(self) -> Any:
        """Return all entries, nested as saved; of a native step only the weights."""
        return self.read_tensors(self.stored)


def reads_by_file(
    reads: Iterable[Read], stored: Mapping[str, StoredTensor]
) -> dict[str, list[tuple[Chunk, Read]]]:
    """Crop reads to the chunks that store them. Their boxes become relative to the chunks.

    The files are sorted by name, the reads of a file by the positions of their chunks.
    """
    by_file: dict[str, list[tuple[Chunk, Read]]] = {}
    for read in reads:
        if not read.target.numel():
            continue
        for chunk in _near(read.box, stored[read.name]):
            if part := read.within(box_at(chunk.offsets, chunk.sizes)):
                by_file.setdefault(chunk.file, []).append((chunk, part))
    for parts in by_file.values():
        parts.sort(key=lambda each: each[0].start)
    return dict(sorted(by_file.items()))


def _near(box: Box, tensor: StoredTensor) -> Iterable[Chunk]:
    """Return the chunks that a box may overlap, by the first dimension that chunks divide.

    A tensor of a large run has thousands of chunks, of which a rank needs a few.
    """
    chunks = tensor.chunks
    sizes = chunks[0].sizes if chunks else ()
    divided = [dim for dim, size in enumerate(sizes) if size < tensor.shape[dim]]
    if not divided:
        return chunks
    dim = divided[0]
    start, count, step = box[dim]
    end = start + (count - 1) * step
    return [c for c in chunks if c.offsets[dim] <= end and start < c.offsets[dim] + c.sizes[dim]]


def check_coverage(name: str, shape: Shape, boxes: Iterable[Box]) -> None:
    """Raise CheckpointError unless `boxes` (steps of 1) cover every element exactly once."""
    if 0 in shape:
        return
    boxes = list(boxes)
    # The edges of all boxes divide the tensor into a grid of cells. Count the boxes on each cell.
    edges = [
        sorted({0, n} | {edge for b in boxes for edge in (b[d][0], b[d][0] + b[d][1])})
        for d, n in enumerate(shape)
    ]
    cell_of = [{edge: i for i, edge in enumerate(dim)} for dim in edges]
    counts = np.zeros([len(dim) - 1 for dim in edges], dtype=np.int32)
    for box in boxes:
        cells = zip(cell_of, box, strict=True)
        counts[tuple(slice(index[start], index[start + n]) for index, (start, n, _) in cells)] += 1
    wrong = np.argwhere(counts != 1)
    if len(wrong):
        bounds = [(dim[i], dim[i + 1]) for dim, i in zip(edges, wrong[0], strict=True)]
        region = ", ".join(f"{low}:{high}" for low, high in bounds)
        problem = "is missing" if counts[tuple(wrong[0])] == 0 else "is stored more than once"
        raise CheckpointError(f"{name}[{region}] {problem}: {name} is {list(shape)}")
