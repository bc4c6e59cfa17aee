"""A directory of safetensors files as rectangles: each read is of exactly the bytes that are asked for."""

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
from torchtitan_like.checkpoint.hf.pieces import Form, Piece
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, INDEX, Entry, read_header
from torchtitan_like.checkpoint.step_folders import is_inside
from torchtitan_like.models.hf_table import Box
from torchtitan_like.util.reading import read_json

logger = logging.getLogger()

SINGLE = "model.safetensors"
# Added to the name of a float8 weight: one factor for each of its blocks (DeepSeek-V3, arXiv:2412.19437, section 3.3).
SCALE = "_scale_inv"
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Stored(Form):
    """Where a tensor lies: `offset` in bytes from the beginning of the file of that name."""

    file: str
    offset: int


@dataclass(frozen=True)
class SafetensorsSource:
    """All tensors of a directory. scales: of the float8 ones among them, under the weight's name; one per `block`
    (rows, columns)."""

    path: Path
    stored: Mapping[str, Stored]
    scales: Mapping[str, Stored]
    block: tuple[int, ...]

    def fill(self, wanted: Iterable[Piece]) -> None:
        """Read file by file, from front to back. Raises DamagedError where a file ends too early."""

        def place(piece: Piece) -> tuple[str, int]:
            return self.stored[piece.theirs].file, self.stored[piece.theirs].offset

        for name, group in groupby(sorted(wanted, key=place), key=lambda piece: place(piece)[0]):
            with open(self.path / name, "rb", buffering=0) as file:
                for piece in group:
                    numbers = read_box(file, self.stored[piece.theirs], piece.box)
                    if piece.theirs in self.scales:
                        numbers = numbers.float() * self._factors(self.scales[piece.theirs], piece.box)
                    piece.target.copy_(numbers)

    def _factors(self, scale: Stored, box: Box) -> Tensor:
        """The factor of every element of a float8 weight's box, in float32."""
        lines = [
            torch.arange(start, start + n * step, step) // b
            for (start, n, step), b in zip(box, self.block, strict=True)
        ]
        blocks = tuple((int(line[0]), int(line[-1] - line[0]) + 1, 1) for line in lines)
        with open(self.path / scale.file, "rb", buffering=0) as file:
            factors = read_box(file, scale, blocks).float()
        rows, columns = (line - line[0] for line in lines)
        return factors[rows[:, None], columns]


def open_safetensors(folder: Path, *, quantized: bool) -> SafetensorsSource:
    """Read every header of the directory. Raises DamagedError for headers or files that are not whole, CheckpointError
    where there is nothing to read, or where weights are quantised and `quantized` is false, or the other way round.
    """
    stored = _merge(folder, {name: read_header(folder / name)[0] for name in _find_files(folder)})
    scales = {name: stored[name + SCALE] for name in stored if name + SCALE in stored}
    block = _find_block(folder, quantized=quantized, found=bool(scales))
    for name, scale in scales.items():
        expected = tuple(-(-n // b) for n, b in zip(stored[name].shape, block, strict=False))
        if len(stored[name].shape) != 2 or scale.shape != expected:
            raise CheckpointError(
                f"{folder}: {name} {stored[name].shape} has factors {scale.shape}; blocks of {block}, as config.json "
                f"says, would need {expected}"
            )
        del stored[name + SCALE]
    float8 = {name for name, tensor in stored.items() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point}
    if lacking := sorted(float8 - scales.keys()):
        raise CheckpointError(f"{folder}: float8 weights without their factors ({SCALE}): {', '.join(lacking)}")
    if wide := sorted(scales.keys() - float8):  # multiplied out by somebody, it may be, who has left the factors there
        raise CheckpointError(f"{folder}: weights with factors ({SCALE}) that are no float8: {', '.join(wide)}")
    return SafetensorsSource(folder, stored, scales, block)


def _find_block(folder: Path, *, quantized: bool, found: bool) -> tuple[int, ...]:
    """Rows and columns of the blocks that have one factor each; (1, 1) where nothing is quantised."""
    config = folder / "config.json"
    try:
        method = read_json(config).get("quantization_config") or {} if config.exists() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedError(f"{config} cannot be read: {type(error).__name__} {error}") from error
    if found and not quantized:
        raise CheckpointError(
            f"{folder} holds float8 weights in blocks: set checkpoint.initial_load_in_hf_quantized = true"
        )
    if quantized and not found:
        raise CheckpointError(
            f"checkpoint.initial_load_in_hf_quantized is true, but {folder} holds no factors of float8 blocks ({SCALE}), "
            "the one kind that can be read; " + (f"its config.json says {method}" if method else "set it to false")
        )
    block = method.get("weight_block_size") if found else (1, 1)
    if not block:
        raise CheckpointError(f"{config} does not tell the size of the blocks: quantization_config.weight_block_size")
    return tuple(block)


def _find_files(folder: Path) -> list[str]:
    """The files that the index names; without one, `model.safetensors`, else all that there are."""
    if (folder / INDEX).exists():
        names = sorted(set(_read_index(folder).values()))
    elif (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        parts = [match for name in names if (match := _PART.fullmatch(name))]
        # Every file of a set tells how many there are.
        names = sorted({*names, *(f"{m[1]}{i + 1:05d}-of-{m[3]}.safetensors" for m in parts for i in range(int(m[3])))})
    if not names:
        raise CheckpointError(f"{folder} holds no safetensors files: give the directory that contains them")
    if beside := sorted({path.name for path in folder.glob("*.safetensors")} - set(names)):
        logger.warning(f"{folder}: read are {_several(names)}, and not {_several(beside)}, which stand beside them")
    if absent := [name for name in names if not (folder / name).exists()]:
        raise DamagedError(
            f"{folder} is not whole: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not there"
        )
    return names


def _several(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _read_index(folder: Path) -> dict[str, str]:
    try:
        index: dict[str, str] = read_json(folder / INDEX)["weight_map"]
        if all(isinstance(file, str) and _is_plain(file) for file in index.values()):
            return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DamagedError(f"{folder / INDEX} is not an index: expected a weight_map from tensors to files beside it")


def _is_plain(file: str) -> bool:
    return is_inside(file) and Path(file).name == file


def _merge(folder: Path, headers: Mapping[str, list[Entry]]) -> dict[str, Stored]:
    """The tensors of all files. Raises DamagedError where the index says otherwise, or two files have the same one."""
    merged: dict[str, Stored] = {}
    for file, entries in headers.items():
        for entry in entries:
            if entry.name in merged:
                raise DamagedError(f"{folder}: both {merged[entry.name].file} and {file} hold a {entry.name}")
            merged[entry.name] = Stored(entry.shape, DTYPES[entry.dtype], file, entry.begin)
    if (folder / INDEX).exists():
        for name, file in _read_index(folder).items():
            if name not in merged or merged[name].file != file:
                raise DamagedError(f"{folder / file} does not hold {name}, of which {INDEX} says so")
    return merged


def read_box(file: FileIO, stored: Stored, box: Box) -> Tensor:
    """The rectangle, as it is stored. Raises DamagedError where the file ends before it."""
    numbers = torch.empty([count for _, count, _ in box], dtype=stored.dtype)
    target = numbers.view(-1).view(torch.uint8).numpy().data
    for offset, length in _byte_runs(stored, box):
        file.seek(offset)
        while length:
            read = file.readinto(target[:length])
            if not read:
                raise DamagedError(f"{file.name} ends at byte {offset}, within a tensor")
            target, offset, length = target[read:], offset + read, length - read
    return numbers


def _byte_runs(stored: Stored, box: Box) -> Iterator[tuple[int, int]]:
    """(offset in the file, length) of the stretches of bytes that make up the box, in its order."""
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
