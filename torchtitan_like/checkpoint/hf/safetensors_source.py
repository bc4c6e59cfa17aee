"""Read rectangles of the tensors in a directory of safetensors files, without other bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import FileIO
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_like.checkpoint.dcp_metadata import Chunk
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf.quantized import (
    BLOCKS,
    SCALE,
    SCALES,
    Float8Scales,
    PackedWeight,
    find_packed,
    find_scales,
    read_packed,
)
from torchtitan_like.checkpoint.hf.safetensors_file import (
    DTYPES,
    INDEX,
    Entry,
    read_header,
    read_weight_map,
)
from torchtitan_like.checkpoint.source import (
    Read,
    Source,
    StoredTensor,
    check_coverage,
    reads_by_file,
)
from torchtitan_like.checkpoint.step_folders import Manifest, file_records
from torchtitan_like.checkpoint.verification import find_damage
from torchtitan_like.util.boxes import Box, box_at, contiguous_strides, sizes_of
from torchtitan_like.util.reading import parse_json

logger = logging.getLogger()

SINGLE = "model.safetensors"
SHARDING_INFO = "DCP_SHARDING_INFO"  # torch's key: {name: {"saved_offsets": [...]}} as JSON
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


class SafetensorsSource(Source):
    """All tensors of a directory.

    float8: the scales of float8 weights.
    packed: name of an MXFP4 weight -> its tensors. In `stored` it has the shape and the dtype of
        the values.
    """

    format = "hf"
    stored: Mapping[str, StoredTensor]

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, StoredTensor],
        float8: Float8Scales | None = None,
        packed: Mapping[str, PackedWeight] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(path, stored, (), manifest)
        self.stored = stored
        self._float8 = float8 or Float8Scales({}, (1, 1))
        self._packed = packed or {}

    def fill(self, reads: Iterable[Read]) -> None:
        """Read file by file, in byte order. Raises DamagedError if a file is too short."""
        for name, parts in reads_by_file(reads, self.stored).items():
            with open(self.path / name, "rb", buffering=0) as file:
                for chunk, read in parts:
                    if read.name in self._packed:
                        packed = self._packed[read.name]
                        read.target.copy_(read_packed(packed, read.box, self._read))
                        continue
                    dtype, target = self.stored[read.name].dtype, read.target
                    if read.name in self._float8.scales:
                        scales = self._float8.read(read.name, read.box, self._read)
                        target.copy_(read_box(file, chunk, dtype, read.box).float() * scales)
                    elif target.is_cpu and target.dtype == dtype and target.is_contiguous():
                        read_box(file, chunk, dtype, read.box, target)
                    else:
                        target.copy_(read_box(file, chunk, dtype, read.box))

    def _read(self, stored: StoredTensor, box: Box) -> Tensor:
        [chunk] = stored.chunks
        with open(self.path / chunk.file, "rb", buffering=0) as file:
            return read_box(file, chunk, stored.dtype, box)

    def read_all(self) -> dict[str, Tensor]:
        """Return all tensors. Verifies the files if the manifest has hashes."""
        for damage in find_damage(self.path, file_records(self.manifest)):
            raise damage
        return self.read_tensors(self.stored)


def open_safetensors(
    folder: Path, *, quantized: bool, manifest: Manifest | None = None
) -> SafetensorsSource:
    """Read every header of the directory.

    Raises DamagedError for damaged files. Raises CheckpointError if there are no files, if the
    weights are quantized and `quantized` is False, or the reverse.
    """
    stored = _merge(folder, {name: read_header(folder / name)[0] for name in _find_files(folder)})
    packed = find_packed(stored)
    for name, weight in packed.items():
        del stored[name + BLOCKS], stored[name + SCALES]
        chunk = weight.blocks.chunks[0]._replace(offsets=(0, 0, 0), sizes=weight.shape)
        stored[name] = StoredTensor(weight.shape, torch.bfloat16, (chunk,))
    float8 = find_scales(folder, stored, quantized=quantized, is_packed=bool(packed))
    for name in float8.scales:
        del stored[name + SCALE]
    return SafetensorsSource(folder, stored, float8, packed, manifest)


def _find_files(folder: Path) -> list[str]:
    """Return the files of the index. Without an index: `model.safetensors`, else all files."""
    if (folder / INDEX).exists():
        names = sorted(set(read_weight_map(folder / INDEX).values()))
    elif (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        parts = [match for name in names if (match := _PART.fullmatch(name))]
        # Each file name of a set contains the number of files.
        expected = {
            f"{m[1]}{i + 1:05d}-of-{m[3]}.safetensors" for m in parts for i in range(int(m[3]))
        }
        names = sorted({*names, *expected})
    if not names:
        raise CheckpointError(f"{folder} contains no safetensors files")
    if ignored := sorted({path.name for path in folder.glob("*.safetensors")} - set(names)):
        logger.warning(f"{folder}: reading {_summary(names)}, ignoring {_summary(ignored)}")
    if absent := [name for name in names if not (folder / name).exists()]:
        raise DamagedError(f"{folder} lacks {', '.join(absent)}")
    return names


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _merge(folder: Path, headers: Mapping[str, list[Entry]]) -> dict[str, StoredTensor]:
    """Return the tensors of all files.

    Raises DamagedError if two files have the same tensor, or the index contradicts the headers.
    """
    merged: dict[str, StoredTensor] = {}
    for file, entries in headers.items():
        for entry in entries:
            if entry.name in merged:
                first = merged[entry.name].chunks[0].file
                raise DamagedError(f"{folder}: {first} and {file} both contain {entry.name}")
            offsets = (0,) * len(entry.shape)
            merged[entry.name] = _stored(entry, file, offsets)
    if (folder / INDEX).exists():
        for name, file in read_weight_map(folder / INDEX).items():
            if name not in merged or merged[name].chunks[0].file != file:
                raise DamagedError(f"{folder / file} does not contain {name}, which {INDEX} lists")
    return merged


def _stored(entry: Entry, file: str, offsets: tuple[int, ...]) -> StoredTensor:
    chunk = Chunk(offsets, entry.shape, file, entry.start, entry.end - entry.start)
    return StoredTensor(entry.shape, DTYPES[entry.dtype], (chunk,))


# ---- shards of a distributed checkpoint


def has_shards(folder: Path) -> bool:
    """Return whether torch's `HuggingFaceStorageWriter(save_distributed=True)` wrote a file in it.

    Raises DamagedError, OSError.
    """
    return any(SHARDING_INFO in read_header(path)[1] for path in folder.glob("*.safetensors"))


def open_shards(folder: Path) -> SafetensorsSource:
    """Read the headers of all shard files in a folder. Each has a block of each of its tensors.

    Raises CheckpointError if a file is missing or is not a shard file, or unless the shards cover
    each tensor exactly once; DamagedError if a file is damaged.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} contains no *.safetensors files")
    names = [path.name.split("-") for path in paths]
    numbers = {int(name[1]) for name in names if name[0] == "shard" and name[1].isdigit()}
    if gap := sorted(set(range(1, max(numbers, default=0) + 1)) - numbers):
        raise CheckpointError(f"{folder} lacks the file of shard {gap[0]} of {max(numbers)}")
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        for name, shard in _read_shard(path).items():
            stored[name] = _join(name, stored[name], shard, path) if name in stored else shard
    for name, tensor in stored.items():
        _check_shards(folder, name, tensor)
    return SafetensorsSource(folder, stored)


def _join(name: str, tensor: StoredTensor, shard: StoredTensor, path: Path) -> StoredTensor:
    """Add a shard to the shards of a tensor that were found in other files."""
    if len(tensor.shape) != len(shard.shape):
        raise CheckpointError(
            f"{name} has {len(shard.shape)} dimensions in {path}, {len(tensor.shape)} in others"
        )
    if tensor.dtype != shard.dtype:
        raise CheckpointError(
            f"{name} is {shard.dtype} in {path}, but {tensor.dtype} in another file"
        )
    shape = tuple(map(max, tensor.shape, shard.shape))
    return replace(tensor, shape=shape, chunks=tensor.chunks + shard.chunks)


def _check_shards(folder: Path, name: str, tensor: StoredTensor) -> None:
    if 0 in tensor.shape:
        return
    files: dict[Box, str] = {}
    for chunk in tensor.chunks:
        box = box_at(chunk.offsets, chunk.sizes)
        if box in files:
            raise CheckpointError(
                f"{folder / files[box]} and {folder / chunk.file} contain the same part of {name}"
            )
        files[box] = chunk.file
    check_coverage(name, tensor.shape, files)


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a shard file. The shape ends where the shard ends."""
    entries, metadata = read_header(path)
    if SHARDING_INFO not in metadata:
        raise CheckpointError(
            f"{path} is not a shard file: its metadata lacks {SHARDING_INFO}. Expected files that "
            "torch's HuggingFaceStorageWriter wrote with save_distributed=True: remove other files"
        )
    try:
        info = parse_json(metadata[SHARDING_INFO])
        stored = {}
        for entry in entries:
            offsets = tuple(info[entry.name]["saved_offsets"])
            ends = tuple(sum(pair) for pair in zip(offsets, entry.shape, strict=True))
            stored[entry.name] = replace(_stored(entry, path.name, offsets), shape=ends)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path}: {SHARDING_INFO} does not match its tensors ({type(error).__name__} {error})"
        ) from error
    return stored


# ---- bytes


def read_box(
    file: FileIO, chunk: Chunk, dtype: torch.dtype, box: Box, out: Tensor | None = None
) -> Tensor:
    """Read a box of a chunk in its stored dtype. Raises DamagedError if the file is too short.

    out: a contiguous tensor on the CPU to read into.
    """
    if box and box[-1][2] > 1:  # a run for each element would be slow
        *outer, (start, count, step) = box
        dense = (*outer, (start, (count - 1) * step + 1, 1))
        values = read_box(file, chunk, dtype, dense)[..., ::step]
        return values if out is None else out.copy_(values)
    values = torch.empty(sizes_of(box), dtype=dtype) if out is None else out
    target = values.view(-1).view(torch.uint8).numpy().data
    for first, num_elements in _runs(chunk.sizes, box):
        offset, length = chunk.start + first * dtype.itemsize, num_elements * dtype.itemsize
        file.seek(offset)
        while length:
            read = file.readinto(target[:length])
            if not read:
                raise DamagedError(f"{file.name} ends at byte {offset}, in the middle of a tensor")
            target, offset, length = target[read:], offset + read, length - read
    return values


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of each contiguous run of the box, in order."""
    strides = contiguous_strides(shape)
    run, dim = 1, len(box)
    first = 0
    while dim and (box[dim - 1][1] == 1 or box[dim - 1][2] == 1):
        dim -= 1
        start, count, _ = box[dim]
        first += start * strides[dim]
        run *= count
        if count != shape[dim]:
            break
    outer = [
        range(start * stride, (start + count * step) * stride, step * stride)
        for (start, count, step), stride in zip(box[:dim], strides, strict=False)
    ]
    for offsets in product(*outer):
        yield first + sum(offsets), run
