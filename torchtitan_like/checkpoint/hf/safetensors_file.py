"""Safetensors format: 8 bytes with the header's length, the header as JSON, all tensors without gaps.

https://github.com/huggingface/safetensors#format
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
from torchtitan_like.util.reading import parse_json

INDEX = "model.safetensors.index.json"
PAGE = 4096  # bytes; data starts on a page of its own, so that no page is written twice
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 64  # numpy's limit, and torch's
_MAX_HEADER = 100 * 10**6  # bytes, the library's own limit


class Entry(NamedTuple):
    """One tensor in a file: C order, bytes `begin` to `end` of the file; dtype is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """A file's header and the positions of its tensors: everything except the values."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]  # in the order of their bytes
    size: int


def dtype_code(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype. Raises CheckpointError if it has none."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"safetensors files hold no {dtype}; they hold {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def lay_out(
    name: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Lay out a file of tensors (name, dtype, shape), in this order, but wide dtypes first.

    That order aligns every element. Data starts at a multiple of PAGE. `metadata` is added to
    `format`, which some readers require.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    spans, end = [], 0
    for tensor, dtype, shape in ordered:
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        spans.append((begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    start = 8 + len(text)
    entries = tuple(
        Entry(*tensor, start + a, start + b)
        for tensor, (a, b) in zip(ordered, spans, strict=True)
    )
    return FileLayout(name, struct.pack("<Q", len(text)) + text, entries, start + end)


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors of a file in the order of their bytes, and its metadata.

    Raises DamagedError unless the tensors cover every byte after the header exactly once.
    """
    if not path.is_file():  # reading a pipe would not end
        raise DamagedError(f"{path} is no safetensors file: it is no regular file")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise DamagedError(
                f"{path} is no safetensors file: its {size} bytes do not hold the header they announce"
            )
        text = file.read(length)
    start = 8 + length
    try:
        header = parse_json(text)
        metadata = header.pop("__metadata__", {})
        tensors = [
            (tuple(v["data_offsets"]), name, v["dtype"], tuple(v["shape"]))
            for name, v in header.items()
        ]
        entries = [
            Entry(name, dtype, shape, start + a, start + b)
            for (a, b), name, dtype, shape in sorted(tensors)
        ]
        if any(type(n) is not int or n < 0 for entry in entries for n in entry.shape):
            raise ValueError("a shape is no list of sizes")
        if any(type(n) is not int for entry in entries for n in (entry.begin, entry.end)):
            raise ValueError("data_offsets are no integers")
        if any(len(entry.shape) > _MAX_DIMENSIONS for entry in entries):
            raise ValueError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
        if not isinstance(metadata, dict):
            raise ValueError("__metadata__ is no object")
        lengths = [math.prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} has a header that cannot be read: {type(error).__name__} {error}"
        ) from error
    position = start
    for entry, expected in zip(entries, lengths, strict=True):
        if entry.begin != position or entry.end - entry.begin != expected:
            raise DamagedError(
                f"{path}: {entry.name}, {entry.dtype} {list(entry.shape)}, has bytes {entry.begin} "
                f"to {entry.end}, expected {position} to {position + expected}"
            )
        position = entry.end
    if position != size:
        raise DamagedError(f"{path} has {size} bytes, its header describes {position}")
    return entries, metadata


def file_names(count: int) -> list[str]:
    """Return the conventional names of a model's `count` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def render_index(files: Iterable[FileLayout]) -> bytes:
    """Return the content of `model.safetensors.index.json`: the file of each tensor, the total size."""
    files = list(files)
    total = sum(entry.end - entry.begin for file in files for entry in file.entries)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"
