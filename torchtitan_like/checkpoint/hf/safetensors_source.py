"""Read rectangles of the tensors in a directory of safetensors files: exactly the bytes needed."""

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

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf.reads import Read, TensorInfo
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, INDEX, Entry, read_header
from torchtitan_like.checkpoint.step_folders import is_inside
from torchtitan_like.models.hf_table import Box
from torchtitan_like.util.reading import read_json

logger = logging.getLogger()

SINGLE = "model.safetensors"
# Suffix of the tensor with one factor per block of a float8 weight (DeepSeek-V3, arXiv:2412.19437,
# section 3.3).
SCALE = "_scale_inv"
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """A tensor in a file; `offset` in bytes from the start of the file."""

    file: str
    offset: int


@dataclass(frozen=True)
class SafetensorsSource:
    """All tensors of a directory.

    scales: name of a float8 weight -> its factors, one for each `block` (rows, columns).
    """

    path: Path
    stored: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]
    block: tuple[int, ...]

    def fill(self, reads: Iterable[Read]) -> None:
        """Read file by file, in the order of the bytes. Raises DamagedError if a file is too short."""

        def location(read: Read) -> tuple[str, int]:
            return self.stored[read.name].file, self.stored[read.name].offset

        in_order = sorted(reads, key=location)
        for name, group in groupby(in_order, key=lambda read: location(read)[0]):
            with open(self.path / name, "rb", buffering=0) as file:
                for read in group:
                    values = read_box(file, self.stored[read.name], read.box)
                    if read.name in self.scales:
                        values = values.float() * self._factors(self.scales[read.name], read.box)
                    read.target.copy_(values)

    def _factors(self, scale: StoredTensor, box: Box) -> Tensor:
        """Return the factor of every element of a float8 weight's box, in float32."""
        block_index = [
            torch.arange(start, start + n * step, step) // b
            for (start, n, step), b in zip(box, self.block, strict=True)
        ]
        blocks = tuple((int(i[0]), int(i[-1] - i[0]) + 1, 1) for i in block_index)
        with open(self.path / scale.file, "rb", buffering=0) as file:
            factors = read_box(file, scale, blocks).float()
        rows, columns = (i - i[0] for i in block_index)
        return factors[rows[:, None], columns]


def open_safetensors(folder: Path, *, quantized: bool) -> SafetensorsSource:
    """Read every header of the directory.

    Raises DamagedError for damaged headers or files. Raises CheckpointError if there is nothing to
    read, or if the weights are quantized and `quantized` is False, or the reverse.
    """
    stored = _merge(folder, {name: read_header(folder / name)[0] for name in _find_files(folder)})
    scales = {name: stored[name + SCALE] for name in stored if name + SCALE in stored}
    block = _find_block(folder, quantized=quantized, has_scales=bool(scales))
    for name, scale in scales.items():
        expected = tuple(-(-n // b) for n, b in zip(stored[name].shape, block, strict=False))
        if len(stored[name].shape) != 2 or scale.shape != expected:
            raise CheckpointError(
                f"{folder}: {name} {stored[name].shape} has factors {scale.shape}; blocks of "
                f"{block}, as in config.json, would need {expected}"
            )
        del stored[name + SCALE]
    float8 = {
        name
        for name, tensor in stored.items()
        if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    }
    if without_scale := sorted(float8 - scales.keys()):
        names = ", ".join(without_scale)
        raise CheckpointError(f"{folder}: float8 weights without their factors ({SCALE}): {names}")
    # Perhaps another program dequantized the weights and left the factors in the file.
    if not_float8 := sorted(scales.keys() - float8):
        names = ", ".join(not_float8)
        raise CheckpointError(f"{folder}: weights with factors ({SCALE}) that are no float8: {names}")
    return SafetensorsSource(folder, stored, scales, block)


def _find_block(folder: Path, *, quantized: bool, has_scales: bool) -> tuple[int, ...]:
    """Return rows and columns of the blocks with one factor each; (1, 1) if nothing is quantized."""
    config = folder / "config.json"
    try:
        method = read_json(config).get("quantization_config") or {} if config.exists() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedError(f"{config} cannot be read: {type(error).__name__} {error}") from error
    if has_scales and not quantized:
        raise CheckpointError(
            f"{folder} holds float8 weights in blocks: set checkpoint.initial_load_in_hf_quantized = true"
        )
    if quantized and not has_scales:
        raise CheckpointError(
            f"checkpoint.initial_load_in_hf_quantized is true, but {folder} holds no factors of "
            f"float8 blocks ({SCALE}), the one kind that can be read; "
            + (f"its config.json says {method}" if method else "set it to false")
        )
    block = method.get("weight_block_size") if has_scales else (1, 1)
    if not block:
        raise CheckpointError(
            f"{config} lacks the size of the blocks: expected quantization_config.weight_block_size"
        )
    return tuple(block)


def _find_files(folder: Path) -> list[str]:
    """Return the files that the index names; without an index `model.safetensors`, else all files."""
    if (folder / INDEX).exists():
        names = sorted(set(_read_index(folder).values()))
    elif (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        parts = [match for name in names if (match := _PART.fullmatch(name))]
        # The name of each file of a set has the number of files.
        expected = {
            f"{m[1]}{i + 1:05d}-of-{m[3]}.safetensors" for m in parts for i in range(int(m[3]))
        }
        names = sorted({*names, *expected})
    if not names:
        raise CheckpointError(
            f"{folder} holds no safetensors files: give the directory that contains them"
        )
    if ignored := sorted({path.name for path in folder.glob("*.safetensors")} - set(names)):
        logger.warning(f"{folder}: reading {_summary(names)}, ignoring {_summary(ignored)}")
    if absent := [name for name in names if not (folder / name).exists()]:
        raise DamagedError(f"{folder} is incomplete: missing {', '.join(absent)}")
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
        f"{folder / INDEX} is not an index: expected a weight_map from tensors to files in its folder"
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
                raise DamagedError(f"{folder}: both {first} and {file} hold a {entry.name}")
            dtype = DTYPES[entry.dtype]
            merged[entry.name] = StoredTensor(entry.shape, dtype, file, entry.begin)
    if (folder / INDEX).exists():
        for name, file in _read_index(folder).items():
            if name not in merged or merged[name].file != file:
                raise DamagedError(f"{folder / file} does not hold {name}, although {INDEX} lists it")
    return merged


def read_box(file: FileIO, stored: StoredTensor, box: Box) -> Tensor:
    """Read a rectangle in its stored dtype. Raises DamagedError if the file is too short."""
    values = torch.empty([count for _, count, _ in box], dtype=stored.dtype)
    target = values.view(-1).view(torch.uint8).numpy().data
    for offset, length in _byte_runs(stored, box):
        file.seek(offset)
        while length:
            read = file.readinto(target[:length])
            if not read:
                raise DamagedError(f"{file.name} ends at byte {offset}, within a tensor")
            target, offset, length = target[read:], offset + read, length - read
    return values


def _byte_runs(stored: StoredTensor, box: Box) -> Iterator[tuple[int, int]]:
    """Yield (offset in the file, length) of each contiguous run of the box's bytes, in its order."""
    run, stride, first, dim = 1, 1, 0, len(box)
    while dim and (box[dim - 1][1] == 1 or box[dim - 1][2] == 1):
        dim -= 1
        start, count, _ = box[dim]
        first, run, stride = first + start * stride, count * stride, stride * stored.shape[dim]
        if count != stored.shape[dim]:
            break
    outer = []
    for (start, count, step), size in zip(reversed(box[:dim]), reversed(stored.shape[:dim]), strict=True):
        outer.append(range(start * stride, (start + count * step) * stride, step * stride))
        stride *= size
    width = stored.dtype.itemsize
    for offsets in product(*reversed(outer)):
        yield stored.offset + (first + sum(offsets)) * width, run * width
