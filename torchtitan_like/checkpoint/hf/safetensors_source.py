"""Read rectangles of the tensors in a directory of safetensors files, without other bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import groupby, product
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, SettingsError
from torchtitan_like.checkpoint.hf.mxfp4 import (
    BLOCKS,
    SCALES,
    PackedWeight,
    find_packed,
    read_packed,
)
from torchtitan_like.checkpoint.hf.reads import Read, TensorInfo
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, INDEX, Entry, read_header
from torchtitan_like.checkpoint.step_folders import is_inside
from torchtitan_like.models.hf_table import Box
from torchtitan_like.util.reading import read_json

logger = logging.getLogger()

SINGLE = "model.safetensors"
# Suffix of the tensor with one scale per block of a float8 weight (DeepSeek-V3, arXiv:2412.19437,
# section 3.3).
SCALE = "_scale_inv"
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """A tensor in a file. `offset` is in bytes from the start of the file."""

    file: str
    offset: int


@dataclass(frozen=True)
class SafetensorsSource:
    """All tensors of a directory.

    scales: name of a float8 weight -> its scales, one for each `block` (rows, columns).
    packed: name of an MXFP4 weight -> its tensors. In `stored` it has the shape and the dtype of the
        values.
    """

    path: Path
    stored: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]
    block: tuple[int, ...]
    packed: Mapping[str, PackedWeight]

    def fill(self, reads: Iterable[Read]) -> None:
        """Read file by file, in byte order. Raises DamagedError if a file is too short."""

        def location(read: Read) -> tuple[str, int]:
            return self.stored[read.name].file, self.stored[read.name].offset

        in_order = sorted(reads, key=location)
        for name, group in groupby(in_order, key=lambda read: location(read)[0]):
            with open(self.path / name, "rb", buffering=0) as file:
                for read in group:
                    if read.name in self.packed:
                        packed = self.packed[read.name]
                        read.target.copy_(read_packed(packed, read.box, self._read))
                        continue
                    values = read_box(file, self.stored[read.name], read.box)
                    if read.name in self.scales:
                        values = values.float() * self._read_scales(read)
                    read.target.copy_(values)

    def _read_scales(self, read: Read) -> Tensor:
        """Return the scale of every element of a float8 weight's box, in float32."""
        stored = self.scales[read.name]
        block_index = [
            torch.arange(start, start + n * step, step) // b
            for (start, n, step), b in zip(read.box, self.block, strict=True)
        ]
        blocks = tuple((int(i[0]), int(i[-1] - i[0]) + 1, 1) for i in block_index)
        scales = self._read(stored, blocks).float()
        rows, columns = (i - i[0] for i in block_index)
        return scales[rows[:, None], columns]

    def _read(self, stored: StoredTensor, box: Box) -> Tensor:
        with open(self.path / stored.file, "rb", buffering=0) as file:
            return read_box(file, stored, box)


def open_safetensors(folder: Path, *, quantized: bool) -> SafetensorsSource:
    """Read every header of the directory.

    Raises DamagedError for damaged files. Raises CheckpointError if there are no files, if the
    weights are quantized and `quantized` is False, or the reverse.
    """
    stored = _merge(folder, {name: read_header(folder / name)[0] for name in _find_files(folder)})
    scales = {name: stored[name + SCALE] for name in stored if name + SCALE in stored}
    packed = find_packed(stored)
    for name, weight in packed.items():
        del stored[name + BLOCKS], stored[name + SCALES]
        blocks = weight.blocks
        stored[name] = StoredTensor(weight.shape, torch.bfloat16, blocks.file, blocks.offset)
    kind = "float8" if scales else "MXFP4" if packed else ""
    block = _find_block(folder, quantized=quantized, kind=kind)
    for name, scale in scales.items():
        expected = tuple(-(-n // b) for n, b in zip(stored[name].shape, block, strict=False))
        if len(stored[name].shape) != 2 or scale.shape != expected:
            raise CheckpointError(
                f"{folder}: {name} {stored[name].shape} has scales of shape {scale.shape}. "
                f"Expected {expected} for blocks of {block}: check weight_block_size in config.json"
            )
        del stored[name + SCALE]
    float8 = {
        name
        for name, tensor in stored.items()
        if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    }
    if without_scale := sorted(float8 - scales.keys()):
        names = ", ".join(without_scale)
        raise CheckpointError(
            f"{folder}: float8 weights without scales: {names}. Expected a tensor NAME{SCALE} for "
            "each: copy the checkpoint again"
        )
    # Another program may have dequantized the weights and kept the scales in the file.
    if not_float8 := sorted(scales.keys() - float8):
        names = ", ".join(not_float8)
        raise CheckpointError(
            f"{folder}: weights with scales ({SCALE}) that are not float8: {names}. Expected "
            "float8 weights: remove the scales from the files"
        )
    return SafetensorsSource(folder, stored, scales, block, packed)


def _find_block(folder: Path, *, quantized: bool, kind: str) -> tuple[int, ...]:
    """Return rows and columns of a block with one scale; (1, 1) if no weight is float8.

    kind: "float8", "MXFP4", or empty if no weight is quantized.
    """
    config = folder / "config.json"
    try:
        method = read_json(config).get("quantization_config") or {} if config.exists() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{config} is not valid: {type(error).__name__} {error}. Expected the config of a "
            "Hugging Face model: copy the file again"
        ) from error
    if kind and not quantized:
        raise SettingsError(
            f"{folder} contains {kind} weights with block scales. Expected weights without scales: "
            "set checkpoint.initial_load_in_hf_quantized = true"
        )
    if quantized and not kind:
        raise SettingsError(
            f"checkpoint.initial_load_in_hf_quantized is true, but {folder} has no block scales. "
            f"Expected float8 weights with tensors NAME{SCALE}, or MXFP4 weights"
            + (f"; its config.json has {method}" if method else ": set it to false")
        )
    block = method.get("weight_block_size") if kind == "float8" else (1, 1)
    if not block:
        raise CheckpointError(
            f"{config} does not contain the block size. Expected "
            "quantization_config.weight_block_size: copy the file again"
        )
    return tuple(block)


def _find_files(folder: Path) -> list[str]:
    """Return the files of the index. Without an index: `model.safetensors`, else all files."""
    if (folder / INDEX).exists():
        names = sorted(set(_read_index(folder).values()))
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
        raise CheckpointError(
            f"{folder} contains no safetensors files. Expected at least one: give their directory"
        )
    if ignored := sorted({path.name for path in folder.glob("*.safetensors")} - set(names)):
        logger.warning(f"{folder}: reading {_summary(names)}, ignoring {_summary(ignored)}")
    if absent := [name for name in names if not (folder / name).exists()]:
        raise DamagedError(
            f"{folder} lacks {', '.join(absent)}. Expected all files of the model: copy the "
            "missing ones"
        )
    return names


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _read_index(folder: Path) -> dict[str, str]:
    try:
        index: dict[str, str] = read_json(folder / INDEX)["weight_map"]
        if all(isinstance(file, str) and _is_file_name(file) for file in index.values()):
            return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DamagedError(
        f"{folder / INDEX} is not an index. Expected a weight_map from tensors to files in the "
        "same folder: copy it again"
    )


def _is_file_name(file: str) -> bool:
    return is_inside(file) and Path(file).name == file


def _merge(folder: Path, headers: Mapping[str, list[Entry]]) -> dict[str, StoredTensor]:
    """Return the tensors of all files.

    Raises DamagedError if two files have the same tensor, or the index contradicts the headers.
    """
    merged: dict[str, StoredTensor] = {}
    for file, entries in headers.items():
        for entry in entries:
            if entry.name in merged:
                first = merged[entry.name].file
                raise DamagedError(
                    f"{folder}: {first} and {file} both contain {entry.name}. Expected each tensor "
                    "once: remove the file of another model"
                )
            dtype = DTYPES[entry.dtype]
            merged[entry.name] = StoredTensor(entry.shape, dtype, file, entry.start)
    if (folder / INDEX).exists():
        for name, file in _read_index(folder).items():
            if name not in merged or merged[name].file != file:
                raise DamagedError(
                    f"{folder / file} does not contain {name}. Expected it, because {INDEX} lists "
                    "it: copy the files again"
                )
    return merged


def read_box(file: FileIO, stored: StoredTensor, box: Box) -> Tensor:
    """Read a rectangle in its stored dtype. Raises DamagedError if the file is too short."""
    if box and box[-1][2] > 1:  # a run for each element would be slow
        *outer, (start, count, step) = box
        return read_box(file, stored, (*outer, (start, (count - 1) * step + 1, 1)))[..., ::step]
    values = torch.empty([count for _, count, _ in box], dtype=stored.dtype)
    target = values.view(-1).view(torch.uint8).numpy().data
    for offset, length in _byte_runs(stored, box):
        file.seek(offset)
        while length:
            read = file.readinto(target[:length])
            if not read:
                raise DamagedError(
                    f"{file.name} ends at byte {offset}, in the middle of a tensor. Expected the "
                    "whole tensor: copy the file again"
                )
            target, offset, length = target[read:], offset + read, length - read
    return values


def _byte_runs(stored: StoredTensor, box: Box) -> Iterator[tuple[int, int]]:
    """Yield (offset in the file, length) of each contiguous run of the box's bytes, in order."""
    run, stride, first, dim = 1, 1, 0, len(box)
    while dim and (box[dim - 1][1] == 1 or box[dim - 1][2] == 1):
        dim -= 1
        start, count, _ = box[dim]
        first, run, stride = first + start * stride, count * stride, stride * stored.shape[dim]
        if count != stored.shape[dim]:
            break
    outer = []
    sizes = reversed(stored.shape[:dim])
    for (start, count, step), size in zip(reversed(box[:dim]), sizes, strict=True):
        outer.append(range(start * stride, (start + count * step) * stride, step * stride))
        stride *= size
    width = stored.dtype.itemsize
    for offsets in product(*reversed(outer)):
        yield stored.offset + (first + sum(offsets)) * width, run * width
