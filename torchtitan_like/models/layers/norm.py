"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32 or wider and rounded once.

    Input and output (..., dim), in the input's dtype. Its arguments are dim and eps.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # one look: it may have to be gathered
        if x.is_cpu and not torch.compiler.is_compiling():
            y: Tensor = _RMSNormOnCPU.apply(x, weight, self.eps)
            return y
        return F.rms_norm(x, weight.shape, weight, self.eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """What a fused kernel does elsewhere: on CPU `F.rms_norm` is a chain of operations.

    Forward and backward take a third to a half less time, and of the activations only x itself is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        y: Tensor = (x.to(wide) * inverse_rms).mul_(weight).to(x.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x / rms: d_weight = sum(grad n), d_x = (g - n mean(g n)) / rms where g = grad weight."""
        x, weight, inverse_rms = ctx.saved_tensors
        normed = x.to(inverse_rms.dtype) * inverse_rms
        wide_grad = grad.to(normed.dtype)
        d_weight = (wide_grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        d_normed = wide_grad * weight
        mean = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1).div_(x.shape[-1])
        d_x = d_normed.sub_(normed.mul_(mean)).mul_(inverse_rms).to(x.dtype)
        return d_x, d_weight, None
