"""Plan an export: assign the bytes of each file to ranks, and list the source of each byte.

Every rank computes the same plan from the descriptions of all shards::

    shards of the ranks        links (hf_table)         output tensors            files
    ShardInfo ---------------> Link ------------------> OutputTensor -----------> FileLayout
    name, boxes per holder     native -> external box   dtype, shape, overlaps    header, extents
             |                     |                                                |
             +----- HeldBoxes -----+                                                |
               box of an output tensor, its holders,                                |
               and the same values' box in their shard                              |
                        |                                                           |
                        +----------------------- Copy ------------------------------+
                          the part in one extent: the unit that a rank reads
                          from its shard, sends, and writes

A *holder* is a rank that has the values of a shard. Files are divided into extents of 4 MiB. One
rank writes each extent, once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.safetensors_file import (
    DTYPES,
    Entry,
    FileLayout,
    dtype_code,
    file_names,
    lay_out,
)
from torchtitan_like.checkpoint.source import check_coverage
from torchtitan_like.models.hf_table import Rows, Table, external_shapes, links
from torchtitan_like.models.spec import is_always_float32
from torchtitan_like.util.boxes import (
    Box,
    BoxPair,
    Shape,
    contiguous_strides,
    element_range,
    rectangles,
    sizes_of,
)
from torchtitan_like.util.extents import EXTENT
from torchtitan_like.util.shards import local_boxes

ExtentId = tuple[int, int]  # (number of the file, number of the extent in the file)
ShardKey = tuple[str, Box]  # name of a native tensor, and the holder's box of it


class ShardInfo(NamedTuple):
    """One holder's shard of one native tensor: boxes of the full tensor, with steps of 1."""

    name: str
    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]


class TensorShards(NamedTuple):
    """All shards of one native tensor: box -> the holders that have it."""

    dtype: str
    shape: Shape
    holders: dict[Box, tuple[int, ...]]


class HeldBoxes(NamedTuple):
    """A box of an output tensor, and the box of a shard with the same values.

    boxes: from the shard to the output tensor.
    """

    boxes: BoxPair
    shard: ShardKey
    holders: tuple[int, ...]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output, and the boxes that fill it."""

    dtype: str
    shape: Shape
    parts: list[HeldBoxes]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Copy(NamedTuple):
    """Copy a box of a shard, which `holder` has, to the part of `entry` that is in an extent."""

    extent: ExtentId
    holder: int
    part: HeldBoxes
    boxes: BoxPair
    entry: Entry

    @property
    def shape(self) -> Shape:
        return sizes_of(self.boxes.target)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.entry.dtype].itemsize

    def write(self, extent: Tensor, values: Tensor) -> None:
        """Copy `values` into the extent, uint8 (bytes,), converted to the output's dtype."""
        dtype = DTYPES[self.entry.dtype]
        target = self.boxes.target
        first, end = element_range(target, self.entry.shape)
        offset = self.entry.start - self.extent[1] * EXTENT
        elements = extent[offset + first * dtype.itemsize : offset + end * dtype.itemsize]
        strides = zip(target, contiguous_strides(self.entry.shape), strict=True)
        steps = [step * stride for (_, _, step), stride in strides]
        elements.view(dtype).as_strided(self.shape, steps).copy_(values)


# ---- shards -> output tensors


def describe_shards(
    tensors: Mapping[str, Tensor],
) -> tuple[list[ShardInfo], dict[ShardKey, Tensor]]:
    """Return descriptions of this rank's shards for the other ranks, and a view of each shard.

    Raises CheckpointError for partial sums, and for dtypes that safetensors files cannot store.
    """
    infos: list[ShardInfo] = []
    views: dict[ShardKey, Tensor] = {}
    for name, tensor in tensors.items():
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            raise CheckpointError(f"{name} is a DTensor of partial sums. Expected full values")
        boxes = local_boxes(tensor)
        code = dtype_code(tensor.dtype)
        infos.append(ShardInfo(name, code, tuple(tensor.shape), tuple(box for box, _ in boxes)))
        views |= {(name, box): view for box, view in boxes}
    return infos, views


def merge_shards(
    infos: Sequence[Sequence[ShardInfo]], holder_names: Sequence[str]
) -> dict[str, TensorShards]:
    """Combine the shards of all holders by tensor name. Error messages use `holder_names`.

    Raises CheckpointError unless dtype and shape are equal on all holders, and the boxes cover each
    tensor exactly once.
    """
    merged: dict[str, tuple[ShardInfo, dict[Box, list[int]]]] = {}
    for holder, holder_infos in enumerate(infos):
        for info in holder_infos:
            first, boxes = merged.setdefault(info.name, (info, {}))
            if (first.dtype, first.shape) != (info.dtype, info.shape):
                raise CheckpointError(
                    f"{info.name} is {info.dtype} {list(info.shape)} in {holder_names[holder]}, "
                    f"but {first.dtype} {list(first.shape)} in another one"
                )
            for box in info.boxes:
                boxes.setdefault(box, []).append(holder)
    for name, (info, boxes) in merged.items():
        check_coverage(name, info.shape, boxes)
    return {
        name: TensorShards(info.dtype, info.shape, {box: tuple(h) for box, h in boxes.items()})
        for name, (info, boxes) in merged.items()
    }


def plan_tensors(
    shards: Mapping[str, TensorShards],
    rows: Rows,
    tied: Table,
    dtype: torch.dtype | None,
    copies: Table = (),
) -> dict[str, OutputTensor]:
    """Return the output tensors in file order: by name, with numbers compared as numbers.

    dtype: target dtype of floating-point tensors, except tensors that `is_always_float32` names;
    None keeps their dtypes. copies: pairs of output names; the second one is written with the same
    values as the first one. Raises CheckpointError for tensors that match no row.
    """
    try:
        all_links = links(rows, {name: tensor.shape for name, tensor in shards.items()}, tied)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"the tensors do not match the table of names in the model's hf.py: {error.args[0]}"
        ) from error
    shapes = external_shapes(all_links)
    outputs: dict[str, OutputTensor] = {}
    for link in all_links:
        source = shards[link.native]
        is_converted = DTYPES[source.dtype].is_floating_point and not is_always_float32(link.native)
        code = dtype_code(dtype) if dtype is not None and is_converted else source.dtype
        output = outputs.setdefault(link.external, OutputTensor(code, shapes[link.external], []))
        if output.dtype != code:
            raise CheckpointError(
                f"{link.external} joins tensors of two dtypes, {output.dtype} and {code}: give one"
            )
        for shard_box, holders in source.holders.items():
            if boxes := link.boxes.within_source(shard_box):
                output.parts.append(HeldBoxes(boxes, (link.native, shard_box), holders))
    outputs |= {copy: outputs[name] for name, copy in copies if name in outputs}
    return {name: outputs[name] for name in sorted(outputs, key=natural_key)}


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


# ---- output tensors -> files


def group_by_size(outputs: Mapping[str, OutputTensor], file_bytes: int) -> list[list[str]]:
    """Divide the tensors, in order, into files of at most `file_bytes` (or one tensor)."""
    groups: list[list[str]] = []
    free = 0
    for name, output in outputs.items():
        if not groups or output.nbytes > free:
            groups.append([])
            free = file_bytes
        groups[-1].append(name)
        free -= output.nbytes
    return groups


def group_by_file(names: Iterable[str], files: Mapping[str, Hashable]) -> list[list[str]]:
    """Group the names by file, in the order of the files."""
    groups = defaultdict(list)
    for name in names:
        groups[files[name]].append(name)
    return [groups[file] for file in sorted(groups)]  # type: ignore[type-var] # all of one kind


def lay_out_files(
    outputs: Mapping[str, OutputTensor], groups: Sequence[Sequence[str]]
) -> list[FileLayout]:
    """Return the layout of one file for each group of names."""
    return [
        lay_out(file, [(name, outputs[name].dtype, outputs[name].shape) for name in names])
        for file, names in zip(file_names(len(groups)), groups, strict=True)
    ]


def extents_of(files: Sequence[FileLayout]) -> list[ExtentId]:
    """Return every extent of the files, in order."""
    return [(f, k) for f, file in enumerate(files) for k in range(-(-file.size // EXTENT))]


# ---- files -> ranks that write and send


def assign_extents(
    files: Sequence[FileLayout], outputs: Mapping[str, OutputTensor], num_ranks: int
) -> dict[ExtentId, int]:
    """Choose the rank that writes each extent. Each rank writes the mean, plus or minus an extent.

    Within this limit it is a rank with (almost) the largest share of the extent's bytes. Among
    ranks within 10 % of the largest share, the rank with the fewest extents is chosen.
    """
    num_bytes: dict[ExtentId, Counter[tuple[int, ...]]] = {e: Counter() for e in extents_of(files)}
    for copy in plan_copies(files, outputs, lambda extent, part: part.holders[0]):
        num_bytes[copy.extent][copy.part.holders] += copy.nbytes
    shares: dict[tuple[int, ...], list[ExtentId]] = defaultdict(list)
    for extent, sizes in num_bytes.items():
        most = max(sizes.values(), default=0)
        near = [holders for holders, size in sizes.items() if 10 * size >= 9 * most] or [(0,)]
        least = min(near, key=lambda holders: (len(shares[holders]) / len(holders), holders))
        shares[least].append(extent)
    # Each replica of a shard writes a contiguous run of the shard's extents.
    nearest = {
        extent: holders[i * len(holders) // len(extents)]
        for holders, extents in shares.items()
        for i, extent in enumerate(extents)
    }
    return _limit_to_mean(files, nearest, num_ranks)


def _limit_to_mean(
    files: Sequence[FileLayout], nearest: Mapping[ExtentId, int], num_ranks: int
) -> dict[ExtentId, int]:
    """Return `nearest`, but move the extents beyond the mean of all ranks to ranks below it."""
    sizes = {(f, k): min(EXTENT, files[f].size - k * EXTENT) for f, k in extents_of(files)}
    mean = sum(sizes.values()) / num_ranks
    written = [0] * num_ranks
    owners: dict[ExtentId, int] = {}
    surplus = []
    for extent, size in sizes.items():
        rank = nearest[extent]
        if written[rank] + size > mean:
            surplus.append(extent)
            continue
        owners[extent] = rank
        written[rank] += size
    for extent in surplus:
        rank = min(range(num_ranks), key=written.__getitem__)
        owners[extent] = rank
        written[rank] += sizes[extent]
    return owners


def plan_copies(
    files: Sequence[FileLayout],
    outputs: Mapping[str, OutputTensor],
    choose_holder: Callable[[ExtentId, HeldBoxes], int | None],
) -> Iterator[Copy]:
    """Yield the copies into all extents, in the same order on every rank.

    choose_holder: returns the holder that provides a box for an extent; None skips the copy.
    """
    for f, file in enumerate(files):
        for entry in file.entries:
            width = DTYPES[entry.dtype].itemsize
            for part in outputs[entry.name].parts:
                first, end = element_range(part.boxes.target, entry.shape)
                first_extent = (entry.start + first * width) // EXTENT
                last_extent = (entry.start + (end - 1) * width) // EXTENT
                for k in range(first_extent, last_extent + 1):
                    holder = choose_holder((f, k), part)
                    if holder is None:
                        continue
                    low = max(0, (k * EXTENT - entry.start) // width)
                    high = (min(entry.end, (k + 1) * EXTENT) - entry.start) // width
                    for bounds in rectangles(entry.shape, low, high):
                        if boxes := part.boxes.within_target(bounds):
                            yield Copy((f, k), holder, part, boxes, entry)
