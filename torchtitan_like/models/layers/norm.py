"""Root-mean-square normalization (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Input and output (..., dim) have the same dtype. The computation is in fp32 or wider, rounded
    once. Arguments: dim, eps.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # read once: reading may gather a sharded weight
        if x.is_cpu and not torch.compiler.is_compiling():
            y: Tensor = _RMSNormOnCPU.apply(x, weight, self.eps)
            return y
        return F.rms_norm(x, weight.shape, weight, self.eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm with a hand-written backward, since CPU has no fused kernel for `F.rms_norm`.

    Forward and backward take a third to a half less time, and save only x of the activations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        compute_dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute_dtype)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        y: Tensor = (x.to(compute_dtype) * inverse_rms).mul_(weight).to(x.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x / rms: d_weight = sum(grad n), d_x = (g - n mean(g n)) / rms where g = grad weight."""
        x, weight, inverse_rms = ctx.saved_tensors
        normed = x.to(inverse_rms.dtype) * inverse_rms
        fp32_grad = grad.to(normed.dtype)
        d_weight = (fp32_grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        d_normed = fp32_grad * weight
        mean = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1).div_(x.shape[-1])
        d_x = d_normed.sub_(normed.mul_(mean)).mul_(inverse_rms).to(x.dtype)
        return d_x, d_weight, None


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps)` over the last dimension: RMSNorm without a weight.

    The computation is in fp32 or wider, rounded once to x's dtype.
    """
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(upcast, x.shape[-1:], None, eps).to(x.dtype)
