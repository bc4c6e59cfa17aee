"""Read weights in MXFP4, gpt-oss's format: 4 bits for a value, and a scale for each 32 values.

OCP Microscaling Formats specification, version 1.0, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.models.hf_table import Box, Shape

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.hf.safetensors_source import StoredTensor

# Suffixes of the two tensors of a weight.
BLOCKS = "_blocks"
SCALES = "_scales"
_BLOCK = 32
_BYTES = _BLOCK // 2  # of a block; the low half of a byte is the first of its two values
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


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
                f"{scales.shape}. Expected uint8 blocks of {_BYTES} bytes, and a uint8 scale for "
                "each: copy the checkpoint again"
            )
        packed[weight] = PackedWeight(blocks, scales)
    return packed


def read_packed(
    packed: PackedWeight, box: Box, read: Callable[[StoredTensor, Box], Tensor]
) -> Tensor:
    """Return a box of the weight in float32, which has all of its values exactly.

    read: returns a box of a stored tensor.
    """
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
