"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and its scalings for longer contexts."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_like.models.argument_rules import yarn_scale

# Elements of a head that are rotated together: (i, i + head_dim / 2), or (2i, 2i + 1).
Pairs = Literal["halves", "neighbors"]


class Scaling(Protocol):
    """Changes rotary frequencies for a longer context."""

    def frequencies(self, inverse: Tensor, theta: float) -> Tensor:
        """Return radians per position of each pair, (head_dim / 2,) in fp32.

        inverse: inverses of the frequencies to scale, `theta^(2i / head_dim)`.
        """


class Linear(NamedTuple):
    """Divides all frequencies by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float

    def frequencies(self, inverse: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        return 1.0 / inverse / self.factor


class Llama3(NamedTuple):
    """Llama 3.1's rule (arXiv:2407.21783 and its code).

    It multiplies wavelengths (in tokens) above original_max_seq_len / low_freq_factor by `factor`,
    keeps those below original_max_seq_len / high_freq_factor, and interpolates in between. A factor
    of 1 changes nothing.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def frequencies(self, inverse: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        frequency = 1.0 / inverse
        if self.factor == 1.0:
            return frequency
        wavelength = 2 * math.pi / frequency
        kept = (self.original_max_seq_len / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


class Yarn(NamedTuple):
    """Sizes of YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    factor: length of the context relative to `original_max_seq_len`.
    beta_fast, beta_slow: frequencies that rotate more than beta_fast times in
        original_max_seq_len tokens are kept; frequencies that rotate less than beta_slow times are
        divided by `factor`.
    is_rounded: round the first and last pair of the transition to whole pairs.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float
    beta_slow: float
    is_rounded: bool = True

    def attention_scale(self, mscale: float) -> float:
        """Return the factor of the scores of a longer context: `(0.1 mscale ln(factor) + 1)^2`."""
        return self.table_scale(mscale) ** 2

    def table_scale(self, mscale: float) -> float:
        """Return the factor of queries and of keys that multiplies scores by `attention_scale`."""
        return yarn_scale(self.factor, mscale)

    def frequencies(self, inverse: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        num_pairs = inverse.shape[0]

        def pair_with_rotations(rotations: float) -> float:
            wavelength = self.original_max_seq_len / (2 * math.pi * rotations)
            return num_pairs * math.log(wavelength) / math.log(theta)

        low = pair_with_rotations(self.beta_fast)
        high = pair_with_rotations(self.beta_slow)
        if self.is_rounded:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, 2 * num_pairs - 1)
        index = torch.arange(num_pairs, dtype=torch.float32, device="cpu")
        # Rounded where other implementations round: see `RotaryEmbedding.init_buffers`.
        kept = 1 - ((index - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
        return 1.0 / (self.factor * inverse) * (1 - kept) + 1.0 / inverse * kept


class RotaryEmbedding(nn.Module):
    """Rotates each pair of a head's elements by `position * frequency_i`.

    Rows are in Hugging Face's order. The tables are non-persistent fp32 buffers
    (max_seq_len, 1, head_dim). Attention reads them from this module instead of receiving them as
    arguments, because FSDP casts floating-point arguments to the compute dtype.

    scaling: changes the frequencies; None: `theta^(-2i / head_dim)`.
    scale: factor of the rotated heads.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float,
        *,
        scaling: Scaling | None = None,
        pairs: Pairs = "halves",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.scaling = scaling
        self.pairs = pairs
        self.scale = scale
        shape = (max_seq_len, 1, head_dim)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        if not self.cos.is_meta:
            self.init_buffers(self.cos.device)

    def init_buffers(self, device: torch.device) -> None:
        """Compute the tables on CPU, so that every device has equal ones, and copy them to `device`."""
        cos, sin = self._compute(self.max_seq_len, self.theta, torch.device("cpu"))
        self.cos = cos.to(device)
        self.sin = sin.to(device)

    def frequencies(self) -> Tensor:
        """Return radians per position of each pair, (head_dim / 2,) in fp32."""
        return self._frequencies(self.theta, torch.device("cpu"))

    def _frequencies(self, theta: float, device: torch.device) -> Tensor:
        exponent = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        )
        inverse = torch.pow(theta, exponent).float()
        return 1.0 / inverse if self.scaling is None else self.scaling.frequencies(inverse, theta)

    def _compute(
        self, num_positions: int, theta: float, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines (num_positions, 1, head_dim) of positions from 0."""
        position = torch.arange(num_positions, dtype=torch.float32, device=device)
        # Frequencies and angles are rounded to fp32 where other implementations of Llama round
        # them: at position 8192 the last bit of a frequency changes an angle by 5e-4. Powers,
        # cosines, and sines are exact to the last bit.
        angle = torch.outer(position, self._frequencies(theta, device)).double()
        cos, sin = (angle.cos() * self.scale).float(), (angle.sin() * self.scale).float()
        # The sine has the sign of the other element: (a, b) -> (a cos - b sin, b cos + a sin).
        if self.pairs == "halves":
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        else:
            cos = cos.repeat_interleave(2, dim=-1)
            sin = torch.stack([-sin, sin], dim=-1).flatten(-2)
        return cos.unsqueeze(1), sin.unsqueeze(1)

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


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Rotates longer sequences by a larger base, which depends on their length.

    Up to `original_max_seq_len` tokens the base is theta. For a sequence of n tokens it is
    `theta (factor n / original_max_seq_len - factor + 1)^(head_dim / (head_dim - 2))`: "dynamic"
    NTK-aware scaling, as transformers computes it for a whole sequence (arXiv:2309.00071, B.2).
    """

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float,
        *,
        factor: float,
        original_max_seq_len: int,
    ) -> None:
        super().__init__(head_dim, max_seq_len, theta)
        self.factor = factor
        self.original_max_seq_len = original_max_seq_len

    def tables(self, seq_len: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `RotaryEmbedding.tables`.

        Raises ValueError if a longer sequence has positions: the ranks or documents that they come
        from do not know its length.
        """
        tables = super().tables(seq_len, positions)
        if self.max_seq_len <= self.original_max_seq_len or (
            positions is None and seq_len <= self.original_max_seq_len
        ):
            return tables
        if positions is not None:
            raise ValueError(
                f"dynamic rotary frequencies got positions of sequences of up to {self.max_seq_len} "
                f"tokens: expected whole sequences beyond {self.original_max_seq_len} tokens; use "
                'attn_mask_type = "causal" without context parallelism'
            )
        ratio = self.factor * seq_len / self.original_max_seq_len - (self.factor - 1)
        theta = self.theta * ratio ** (self.head_dim / (self.head_dim - 2))
        return self._compute(seq_len, theta, self.cos.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = "halves") -> Tensor:
    """Rotate heads (batch, seq, heads, head_dim) by `RotaryEmbedding.tables`.

    pairs: the layout of the tables. The computation is in fp32 or wider, rounded once to x's dtype.
    """
    if not x.is_cpu and not torch.compiler.is_compiling():
        rotated: Tensor = FusedRotation.apply(x, cos, sin, pairs)
        return rotated
    fp32_x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.addcmul(fp32_x * cos, _swap(fp32_x, pairs), sin).to(x.dtype)


class FusedRotation(torch.autograd.Function):
    """The same rotation in three CUDA kernels forward and three backward (autograd: 5 and 7).

    CUDA kernels convert dtypes as they compute; CPU kernels would make copies instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = "halves") -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotate_by(x, cos, sin, pairs, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_by(grad, cos, sin, ctx.pairs, direction=-1), None, None, None


def _rotate_by(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, direction: int) -> Tensor:
    """Rotate forward (1) or back (-1); computed in fp32 or wider, because the tables are fp32."""
    swapped = _swap(x, pairs)
    return torch.addcmul(x * cos, swapped, sin, value=direction, out=torch.empty_like(x))


def _swap(x: Tensor, pairs: Pairs) -> Tensor:
    """Swap the two elements of each pair."""
    if pairs == "halves":
        return x.roll(x.shape[-1] // 2, dims=-1)
    swapped: Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return swapped
