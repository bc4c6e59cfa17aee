"""The base class of this package's own optimizers, whose updates can be skipped on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class GatedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that reads on the device whether to skip its update.

    torch's own fused optimizers read `found_inf` in the same way. The host never waits for it.
    """

    @abstractmethod
    def gated_step(self, skip: Tensor) -> None:
        """Update the weights and states. If `skip` (0-dim, 0 or 1) is 1, all keep their bits."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise NotImplementedError: `gated_step` updates the weights."""
        raise NotImplementedError("step() cannot skip an update. Call gated_step(skip)")


def assign(target: Tensor, value: Tensor, skip: Tensor) -> None:
    """Copy `value` to `target`, which keeps its bits if `skip` is 1."""
    target.copy_(torch.where(skip > 0, target, value.to(target.dtype)))
