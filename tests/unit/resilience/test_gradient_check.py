"""Gradients of kernels that are not deterministic are compared by a measured bound."""

from __future__ import annotations

import pytest
import torch

from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.resilience.corruption import GradientCheck, WrongGradientsError


def check_steps(noise: dict[int, dict[str, float]], measures: bool = True) -> list[int]:
    """Check steps whose gradients have this relative noise, by step and name; return passes."""
    generator = torch.Generator().manual_seed(0)
    named = [(name, torch.ones(8)) for name in ("exact", "noisy")]
    check = GradientCheck(10, HostGroup.alone(), named, first_step=1, measures=measures)
    num_passes = []
    for step, scales in noise.items():
        num_passes.append(check.num_passes(step))
        for _ in range(num_passes[-1]):
            for name, parameter in named:
                noise_of_pass = scales.get(name, 0.0) * torch.randn(8, generator=generator)
                parameter.grad = torch.ones(8) + noise_of_pass
            check.add_pass()
        if num_passes[-1]:
            check.compare(step)
    return num_passes


def test_noise_within_the_measured_bound_is_accepted() -> None:
    noise = {"noisy": 1e-4}
    assert check_steps({1: noise, 2: {"exact": 1.0}, 10: noise, 20: noise}) == [4, 0, 2, 2]
    assert check_steps({1: noise, 9: noise}, measures=False) == [0, 0]


@pytest.mark.parametrize(
    ("step", "later", "name"),
    [
        (10, {"exact": 1e-6}, "exact"),
        (10, {"noisy": 0.1}, "noisy"),
        (1, {"exact": 1.0}, "exact"),  # no rounding is as large
    ],
)
def test_other_differences_are_errors(step: int, later: dict[str, float], name: str) -> None:
    noise = {1: {"noisy": 1e-4}} | {step: later}
    with pytest.raises(WrongGradientsError, match=f"of step {step} .*: {name} on rank 0") as caught:
        check_steps(noise)
    assert caught.value.by_rank == {0: [name]}
