"""Read and lay out safetensors files: 8 bytes with the header's length, a JSON header, the tensors.

The tensors have no gaps between them. See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.step_folders import is_inside
from torchtitan_like.util.reading import parse_json, read_json

INDEX = "model.safetensors.index.json"
PAGE = 4096  # bytes; data starts on a new page, so that no page is written twice
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 64  # numpy's limit, and torch's
_MAX_HEADER = 100 * 10**6  # bytes, the limit of the safetensors library


class Entry(NamedTuple):
    """A tensor in C order at bytes `start` to `end` of a file. `dtype` is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """A file's header and the positions of its tensors: everything except the values."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]  # in the order of their bytes
    size: int


def dtype_code(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files. Raises CheckpointError if it has none."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"safetensors files cannot store {dtype}, only {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def lay_out(
    name: str,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> FileLayout:
    """Lay out a file of tensors (name, dtype, shape), in the given order, but wide dtypes first.

    Wide dtypes come first to align every element. Data starts at a multiple of PAGE. `metadata` is
    added to `format`, which some readers require.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    spans = []
    end = 0
    for tensor, dtype, shape in ordered:
        start = end
        end = start + math.prod(shape) * DTYPES[dtype].itemsize
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        spans.append((start, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    data_start = 8 + len(text)
    entries = tuple(
        Entry(*tensor, data_start + a, data_start + b)
        for tensor, (a, b) in zip(ordered, spans, strict=True)
    )
    return FileLayout(name, struct.pack("<Q", len(text)) + text, entries, data_start + end)


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors of a file in the order of their bytes, and its metadata.

    Raises DamagedError unless the tensors cover every byte after the header exactly once.
    """
    if not path.is_file():  # reading from a pipe would block
        raise DamagedError(f"{path} is not a regular file, so it is no safetensors file")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise DamagedError(
                f"{path} has {size} bytes. Expected a header of {length} bytes in them"
            )
        text = file.read(length)
    data_start = 8 + length
    try:
        header = parse_json(text)
        metadata = header.pop("__metadata__", {})
        tensors = [
            (tuple(v["data_offsets"]), name, v["dtype"], tuple(v["shape"]))
            for name, v in header.items()
        ]
        entries = [
            Entry(name, dtype, shape, data_start + a, data_start + b)
            for (a, b), name, dtype, shape in sorted(tensors)
        ]
        if any(type(n) is not int or n < 0 for entry in entries for n in entry.shape):
            raise ValueError("a shape is not a list of sizes")
        if any(type(n) is not int for entry in entries for n in (entry.start, entry.end)):
            raise ValueError("data_offsets are not integers")
        if any(len(entry.shape) > _MAX_DIMENSIONS for entry in entries):
            raise ValueError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
        if not isinstance(metadata, dict):
            raise ValueError("__metadata__ is not an object")
        lengths = [math.prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} has an invalid header: {type(error).__name__} {error}"
        ) from error
    offset = data_start
    for entry, expected in zip(entries, lengths, strict=True):
        if entry.start != offset or entry.end - entry.start != expected:
            raise DamagedError(
                f"{path}: {entry.name}, {entry.dtype} {list(entry.shape)}, has bytes {entry.start} "
                f"to {entry.end}. Expected {offset} to {offset + expected}"
            )
        offset = entry.end
    if offset != size:
        raise DamagedError(f"{path} has {size} bytes. Expected {offset}, as in its header")
    return entries, metadata


def file_names(count: int) -> list[str]:
    """Return the conventional names of a model's `count` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def render_index(files: Iterable[FileLayout]) -> bytes:
    """Return the content of `model.safetensors.index.json`: each tensor's file, the total size."""
    files = list(files)
    total = sum(entry.end - entry.start for file in files for entry in file.entries)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the weight_map of a `model.safetensors.index.json`: tensor -> file in its folder.

    Raises DamagedError if it cannot be read.
    """
    try:
        files = {str(name): str(file) for name, file in read_json(path)["weight_map"].items()}
        if other := [f for f in files.values() if not is_inside(f) or Path(f).name != f]:
            raise ValueError(f"{other[0]!r} is no file name")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(
            f"{path} is not an index of files in its folder: {type(error).__name__} {error}"
        ) from error
    return files
