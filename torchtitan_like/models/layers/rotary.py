"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RotaryEmbedding(nn.Module):
    """Rotates each pair (i, i + head_dim / 2) of a head by `position * frequency_i`.

    This is Hugging Face's order of rows. The tables are non-persistent fp32 buffers
    (max_seq_len, 1, head_dim). Attention reads them from this module instead of receiving them as
    arguments, because FSDP casts floating-point arguments to the compute dtype.

    factor: length of the context relative to `original_max_seq_len`; 1 keeps the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float,
        *,
        factor: float = 1.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_seq_len: int = 8192,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.factor = factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.original_max_seq_len = original_max_seq_len
        shape = (max_seq_len, 1, head_dim)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        if not self.cos.is_meta:
            self.init_buffers(self.cos.device)

    def init_buffers(self, device: torch.device) -> None:
        """Compute the tables on CPU, so that every device has equal ones, and copy them to `device`."""
        position = torch.arange(self.max_seq_len, dtype=torch.float32, device="cpu")
        # Frequencies and angles are rounded to fp32 where other implementations of Llama round
        # them: at position 8192 the last bit of a frequency changes an angle by 5e-4. Powers,
        # cosines, and sines are exact to the last bit.
        angle = torch.outer(position, self.frequencies()).double()
        cos, sin = angle.cos().float(), angle.sin().float()
        self.cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(device)
        # The sine has the sign of the rotated half: (a, b) -> (a cos - b sin, b cos + a sin).
        self.sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(device)

    def frequencies(self) -> Tensor:
        """Return radians per position of each pair, (head_dim / 2,) in fp32: `theta^(-2i / head_dim)`.

        Llama 3.1 multiplies wavelengths (in tokens) above original_max_seq_len / low_freq_factor by
        `factor`, keeps those below original_max_seq_len / high_freq_factor, and interpolates in
        between (arXiv:2407.21783 and its code).
        """
        exponent = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        )
        frequency = 1.0 / torch.pow(self.theta, exponent).float()
        if self.factor == 1.0:
            return frequency
        wavelength = 2 * math.pi / frequency
        kept = (self.original_max_seq_len / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def tables(self, seq_len: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines (seq, 1, head_dim).

        With `positions` (batch, seq) their shape is (batch, seq, 1, head_dim).
        """
        if positions is not None:
            return self.cos[positions], self.sin[positions]
        if seq_len > self.max_seq_len:
            raise ValueError(
                f"a sequence of {seq_len} tokens is longer than max_seq_len = {self.max_seq_len}: "
                "shorten it or raise max_seq_len in [model.args]"
            )
        return self.cos[:seq_len], self.sin[:seq_len]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (batch, seq, heads, head_dim) by `RotaryEmbedding.tables`.

    The computation is in fp32 or wider, rounded once to x's dtype.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        rotated: Tensor = FusedRotation.apply(x, cos, sin)
        return rotated
    fp32_x = x.to(torch.promote_types(x.dtype, torch.float32))
    halves_swapped = fp32_x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(fp32_x * cos, halves_swapped, sin).to(x.dtype)


class FusedRotation(torch.autograd.Function):
    """The same rotation in three CUDA kernels forward and three backward (autograd: 5 and 7).

    CUDA kernels convert dtypes as they compute; CPU kernels would make copies instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_by(x, cos, sin, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_by(grad, cos, sin, direction=-1), None, None


def _rotate_by(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate forward (1) or back (-1); computed in fp32 or wider, because the tables are fp32."""
    halves_swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, halves_swapped, sin, value=direction, out=torch.empty_like(x))
