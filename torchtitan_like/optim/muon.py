"""Muon: momentum whose matrices are orthogonalized, for the weights of hidden layers.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The learning rate can be
scaled as in Liu et al. 2025, arXiv:2502.16982, section 2.2. On one rank and with `muon_dtype =
"bfloat16"`, the weights equal the result of `torch.optim.Muon` to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchtitan_like.optim.elementwise import GatedOptimizer, assign
from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.optim.groups import ParameterGroup

# Coefficients of the quintic polynomial, from Jordan et al.
A, B, C = 3.4445, -4.7750, 2.0315

# Factors of the learning rate for a matrix of `rows` and `columns`.
ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Matrices(Protocol):
    """Brings whole matrices to ranks; see `distributed.matrices.MatrixOwners`."""

    @property
    def is_local(self) -> Sequence[bool]: ...

    def compute(
        self, shards: dict[int, Tensor], function: Callable[[Tensor], Tensor], like: Tensor
    ) -> dict[int, Tensor]: ...


FindMatrices = Callable[[Sequence[Tensor]], Matrices]


class Muon(GatedOptimizer):
    """Muon over parameters of shape (rows, columns), or (matrices, rows, columns) for experts.

    With momentum m, gradient g and weight w: m = lerp(m, g, 1 - momentum); u = lerp(g, m, momentum)
    with Nesterov's momentum, else m; w = w (1 - lr weight_decay) - lr adjust NS(u). Each matrix is
    orthogonalized by one rank, in `dtype`. The state `momentum_buffer` is placed like its weight.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        section: OptimizerSection,
        find_matrices: FindMatrices,
        device: torch.device,
    ) -> None:
        """Build the state, and the plan of who computes which matrix.

        device: of all parameters, of which this rank may have none.
        """
        super().__init__([group.as_torch() for group in groups], {})
        self._momentum = section.muon_momentum
        self._is_nesterov = section.muon_nesterov
        self._num_steps = section.muon_ns_steps
        self._eps = section.muon_eps
        self._adjust_lr = ADJUST_LR[section.muon_adjust_lr_fn]
        self._like = torch.empty(0, dtype=getattr(torch, section.muon_dtype), device=device)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._matrices = find_matrices(parameters)
        for p in parameters:
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    @torch.no_grad()
    def gated_step(self, skip: Tensor) -> None:
        """Update all weights unless `skip` is 1. A collective."""
        members = [(p, group) for group in self.param_groups for p in group["params"]]
        shared: dict[int, Tensor] = {}
        for i, (p, group) in enumerate(members):
            momentum = self._update_momentum(p, skip)
            if self._matrices.is_local[i]:
                self._update_weight(p, group, self._orthogonalize_local(momentum), skip)
            else:
                shared[i] = momentum
        results = self._matrices.compute(shared, self._orthogonalize, self._like)
        for i, update in results.items():
            p, group = members[i]
            self._update_weight(p, group, update, skip)

    def _update_momentum(self, p: Tensor, skip: Tensor) -> Tensor:
        """Update the momentum; return what is orthogonalized, in the dtype of the computation."""
        assert p.grad is not None
        grad = local_shard(p.grad)
        buffer = local_shard(self.state[p]["momentum_buffer"])
        momentum = torch.lerp(buffer, grad, 1 - self._momentum)
        assign(buffer, momentum, skip)
        update = torch.lerp(grad, momentum, self._momentum) if self._is_nesterov else momentum
        return update.to(self._like.dtype)

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        return orthogonalize(matrix, self._num_steps, self._eps)

    def _orthogonalize_local(self, matrices: Tensor) -> Tensor:
        """Orthogonalize one matrix, or a stack of them, which may be empty."""
        if matrices.ndim == 2 or not matrices.numel():
            return self._orthogonalize(matrices) if matrices.numel() else matrices
        return torch.stack([self._orthogonalize(matrix) for matrix in matrices])

    def _update_weight(
        self, p: Tensor, group: dict[str, Any], update: Tensor, skip: Tensor
    ) -> None:
        weight = local_shard(p)
        new = weight * (1 - group["lr"] * group["weight_decay"])
        new.add_(update, alpha=-group["lr"] * self._adjust_lr(*p.shape[-2:]))
        assign(weight, new, skip)


def orthogonalize(matrix: Tensor, num_steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values near 1.

    Newton-Schulz iteration of Jordan et al., in the dtype of `matrix` (rows, columns): with X of
    Frobenius norm 1, X <- A X + (B X X^T + C (X X^T)^2) X. eps: smallest norm to divide by.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.addmm(x, polynomial, x, beta=A)
    return x.T if is_tall else x
