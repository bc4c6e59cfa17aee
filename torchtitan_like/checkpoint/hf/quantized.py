"""Read quantized weights: float8 with a scale for each block, and MXFP4.

Float8: DeepSeek-V3, arXiv:2412.19437, section 3.3. MXFP4, gpt-oss's format, has 4 bits for a value
and a scale for each 32 values: OCP Microscaling Formats specification, version 1.0, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError, SettingsError
from torchtitan_like.checkpoint.source import StoredTensor
from torchtitan_like.util.boxes import Box, Shape
from torchtitan_like.util.reading import read_json

ReadBox = Callable[[StoredTensor, Box], Tensor]  # returns a box of a stored tensor

# Suffix of the tensor with one scale per block of a float8 weight.
SCALE = "_scale_inv"
# Suffixes of the two tensors of an MXFP4 weight.
BLOCKS = "_blocks"
SCALES = "_scales"
_BLOCK = 32
_BYTES = _BLOCK // 2  # of a block; the low half of a byte is the first of its two values
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class Float8Scales(NamedTuple):
    """scales: name of a float8 weight -> its scales, one for each `block` (rows, columns)."""

    scales: Mapping[str, StoredTensor]
    block: tuple[int, ...]

    def read(self, name: str, box: Box, read: ReadBox) -> Tensor:
        """Return the scale of every element of a weight's box, in float32."""
        block_index = [
            torch.arange(start, start + n * step, step) // b
            for (start, n, step), b in zip(box, self.block, strict=True)
        ]
        blocks = tuple((int(i[0]), int(i[-1] - i[0]) + 1, 1) for i in block_index)
        scales = read(self.scales[name], blocks).float()
        rows, columns = (i - i[0] for i in block_index)
        return scales[rows[:, None], columns]


def find_scales(
    folder: Path, stored: Mapping[str, StoredTensor], *, quantized: bool, is_packed: bool
) -> Float8Scales:
    """Return the scales of all float8 weights.

    is_packed: whether the folder has MXFP4 weights.
    Raises CheckpointError if weights and scales do not fit, if the weights are quantized and
    `quantized` is False, or the reverse.
    """
    scales = {name: stored[name + SCALE] for name in stored if name + SCALE in stored}
    kind = "float8" if scales else "MXFP4" if is_packed else ""
    block = _find_block(folder, quantized=quantized, kind=kind)
    for name, scale in scales.items():
        expected = tuple(-(-n // b) for n, b in zip(stored[name].shape, block, strict=False))
        if len(stored[name].shape) != 2 or scale.shape != expected:
            raise CheckpointError(
                f"{folder}: {name} {stored[name].shape} has scales of shape {scale.shape}. "
                f"Expected {expected} for blocks of {block}, the weight_block_size in config.json"
            )
    float8 = {
        name
        for name, tensor in stored.items()
        if tensor.dtype.itemsize == 1
        and tensor.dtype.is_floating_point
        and not name.endswith(SCALE)
    }
    if without_scale := sorted(float8 - scales.keys()):
        names = ", ".join(without_scale)
        raise CheckpointError(
            f"{folder}: float8 weights without scales: {names}. Expected NAME{SCALE} for each"
        )
    # Another program may have dequantized the weights and kept the scales in the file.
    if not_float8 := sorted(scales.keys() - float8):
        names = ", ".join(not_float8)
        raise CheckpointError(
            f"{folder}: weights with scales ({SCALE}) that are not float8: {names}"
        )
    return Float8Scales(scales, block)


def _find_block(folder: Path, *, quantized: bool, kind: str) -> tuple[int, ...]:
    """Return rows and columns of a block with one scale; (1, 1) if no weight is float8.

    kind: "float8", "MXFP4", or empty if no weight is quantized.
    """
    config = folder / "config.json"
    try:
        method = read_json(config).get("quantization_config") or {} if config.exists() else {}
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedError(f"{config} is not valid: {type(error).__name__} {error}") from error
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
            f"{config} does not contain the block size, quantization_config.weight_block_size"
        )
    return tuple(block)


class PackedWeight(NamedTuple):
    """The tensors of a weight (experts, in, out): values are stored along `in`.

    blocks: uint8 (experts, out, in / 32, 16). scales: uint8 (experts, out, in / 32), exponents of 2.
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> Shape:
        experts, rows, num_blocks, _ = self.blocks.shape
        return experts, num_blocks * _BLOCK, rows


def find_packed(stored: Mapping[str, StoredTensor]) -> dict[str, PackedWeight]:
    """Return the packed weights by name. Raises CheckpointError if blocks and scales do not fit."""
    packed = {}
    for name, blocks in stored.items():
        weight = name.removesuffix(BLOCKS)
        if weight == name or weight + SCALES not in stored:
            continue
        scales = stored[weight + SCALES]
        is_valid = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _BYTES)
        if not is_valid or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise CheckpointError(
                f"{name} is {blocks.dtype} {blocks.shape}, and its scales are {scales.dtype} "
                f"{scales.shape}. Expected uint8 blocks of {_BYTES} bytes with a uint8 scale each"
            )
        packed[weight] = PackedWeight(blocks, scales)
    return packed


def read_packed(packed: PackedWeight, box: Box, read: ReadBox) -> Tensor:
    """Return a box of the weight in float32, which has all of its values exactly."""
    experts, (start, count, step), (row, num_rows, row_step) = box
    first, last = start // _BLOCK, (start + (count - 1) * step) // _BLOCK
    # Rows alternate with another weight's rows: fewer, longer reads are faster.
    all_rows = (row, (num_rows - 1) * row_step + 1, 1)
    blocks = (experts, all_rows, (first, last - first + 1, 1))
    scales = read(packed.scales, blocks)[:, ::row_step]
    values = dequantize(read(packed.blocks, (*blocks, (0, _BYTES, 1)))[:, ::row_step], scales)
    offset = start - first * _BLOCK
    return values[..., offset : offset + (count - 1) * step + 1 : step].mT


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Map blocks (..., n, 16) with scales (..., n) to values (..., 32 n) in float32."""
    values = torch.tensor(_POSITIVE + tuple(-value for value in _POSITIVE))
    byte = torch.arange(256)
    pairs = values[torch.stack([byte & 15, byte >> 4], dim=-1)]
    of_blocks = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(of_blocks, scales.int().unsqueeze(-1) - _EXPONENT_BIAS).flatten(-2)
