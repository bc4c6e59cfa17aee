"""torch's Adam and AdamW with their state from the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.optim.groups import ParameterGroup


def build_adam(groups: list[ParameterGroup], section: OptimizerSection) -> torch.optim.Optimizer:
    """Build Adam or AdamW (decoupled weight decay) over groups with the same optimizer."""
    kinds = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    fused = section.implementation == "fused"
    parameters = [p for group in groups for _, p in group.members]
    is_on_gpu = any(not p.is_cpu for p in parameters)
    optimizer: torch.optim.Optimizer = kinds[groups[0].optimizer](
        [group.as_torch() for group in groups],
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=fused,
        foreach=section.implementation == "foreach",
        # Step counts are on the GPU, so that `step_or_restore` can revert them.
        capturable=is_on_gpu and not fused,
    )
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros(
                (), dtype=torch.float32, device=p.device if fused or is_on_gpu else "cpu"
            ),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer
