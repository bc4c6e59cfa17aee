"""AdamW with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), coded by torchao.

A state is a code of 8 bits for each element and a float32 scale for each block of elements. Both
are plain tensors with the placements of the parameter, so that a checkpoint moves between layouts.
torchao's own `AdamW8bit` divides the flattened shard of each rank into blocks. Here a block is a
part of a row, and therefore the same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.config.problems import ConfigError, Problem
from torchtitan_like.optim.elementwise import AdamW, ShardIndices
from torchtitan_like.util.modules import silencing_torchao
from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.optim.groups import ParameterGroup

MIN_ELEMENTS = 4096  # smaller tensors keep their states, as in torchao and bitsandbytes
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
CHUNK = 1 << 22  # elements that are coded at a time: torchao's temporary tensors are of int64


class Coder(NamedTuple):
    """torchao's functions and tables. block_size: elements with a common scale."""

    block_size: int
    tables: dict[str, Tensor]  # state -> float32 values of its 256 codes, in ascending order
    scale: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    quantize: Callable[[Tensor, Tensor], Tensor]
    dequantize: Callable[[Tensor, Tensor, Tensor], Tensor]

    def encode(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the codes (uint8) and scales (float32, one per block) of a state."""
        table = self.tables[name]
        codes, scales = [], []
        blocks = value.to(torch.float32).reshape(-1, self.block_size)
        # Compiled code has no temporary tensors.
        is_whole = torch.compiler.is_compiling()
        for part in [blocks] if is_whole else blocks.split(max(1, CHUNK // self.block_size)):
            scaled, scale = self.scale(part, self.block_size)
            codes.append(self.quantize(scaled, table))
            scales.append(scale)
        num_blocks = value.shape[-1] // self.block_size
        return {
            f"{name}_codes": torch.cat(codes).view(value.shape),
            f"{name}_scales": torch.cat(scales).view(*value.shape[:-1], num_blocks),
        }

    def decode(self, name: str, live: dict[str, Tensor]) -> Tensor:
        """Return the values of a state, float32. live: all stored tensors of a shard."""
        codes, scales = live[f"{name}_codes"], live[f"{name}_scales"]
        if not scales.numel():  # a rank without rows; torchao cannot reshape them
            return torch.zeros(codes.shape, device=codes.device)
        blocks = codes.reshape(-1, self.block_size)
        values = self.dequantize(blocks, self.tables[name], scales.flatten())
        return values.view(codes.shape)


class AdamW8bit(AdamW):
    """AdamW whose means of large matrices have 8 bits.

    A parameter has 8-bit states if it has at least two dimensions and `MIN_ELEMENTS` elements, and
    `optimizer.adamw8bit_block_size` divides its rows. The others have the states of AdamW. This
    depends only on the shape of the whole parameter, not on the layout.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        section: OptimizerSection,
        shard_indices: ShardIndices,
        seed: int,
    ) -> None:
        """Build the state. Raises ConfigError if a rank's shard has a part of a block."""
        device = groups[0].members[0][1].device
        self.coder = _build_coder(section.adamw8bit_block_size, device)
        for group in groups:
            for name, parameter in group.members:
                self._check_shard(name, parameter)
        super().__init__(groups, section, shard_indices, seed)

    def _is_coded(self, p: Tensor) -> bool:
        is_divided = p.ndim > 1 and p.shape[-1] % self.coder.block_size == 0
        return is_divided and p.numel() >= MIN_ELEMENTS

    def _check_shard(self, name: str, p: Any) -> None:
        size = self.coder.block_size
        num_parts = _parts_of_rows(p)
        if self._is_coded(p) and p.shape[-1] % (num_parts * size):
            expected = (
                f"a number that divides the rows on each rank: {name} has rows of {p.shape[-1]} "
                f"elements in {num_parts} parts of {p.shape[-1] / num_parts:g}"
            )
            remedy = "lower it, or lower the degree of tensor parallelism"
            key = "optimizer.adamw8bit_block_size"
            raise ConfigError([Problem(key, size, expected, remedy)])

    def new_states(self, p: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter: zeros."""
        if not self._is_coded(p):
            return super().new_states(p)
        states = {}
        for name in self.state_names:
            states[f"{name}_codes"] = torch.zeros_like(p, dtype=torch.uint8)
            states[f"{name}_scales"] = _zero_scales(p, self.coder.block_size)
        return states


def _build_coder(block_size: int, device: torch.device) -> Coder:
    with silencing_torchao():
        from torchao.optim import quant_utils

    tables = {
        name: torch.tensor(
            quant_utils.create_dynamic_map(signed=is_signed), dtype=torch.float32, device=device
        )
        for name, is_signed in SIGNED.items()
    }
    return Coder(
        block_size,
        tables,
        quant_utils.scale_tensor,
        quant_utils.quantize_8bit_with_qmap,
        quant_utils.dequant_with_qmap,
    )


def _parts_of_rows(p: Any) -> int:
    """Return the number of ranks over which the last dimension of a parameter is sharded."""
    if not hasattr(p, "placements"):
        return 1
    last = p.ndim - 1
    sizes = zip(p.placements, p.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if getattr(placement, "dim", None) == last)


def _zero_scales(p: Any, block_size: int) -> Tensor:
    """Return a scale of 0 for each block of a parameter, with its placements."""
    shard = local_shard(p)
    scales = torch.zeros(
        (*shard.shape[:-1], shard.shape[-1] // block_size), dtype=torch.float32, device=p.device
    )
    if not hasattr(p, "placements"):
        return scales
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*p.shape[:-1], p.shape[-1] // block_size))
    whole = DTensor.from_local(
        scales,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole.to(p.device)  # `from_local` moves offloaded shards to the mesh's device
