"""LocalSGD and DiLoCo: replica groups train on their own, and average every few steps.

They implement `distributed.replica_groups.Synchronizer`. The schedule of both is a pure function of
the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import FaultTolerance

Tensor = torch.Tensor

# The outer optimizer of DiLoCo, as in TorchTitan and in the paper (arXiv:2311.08105, section 3).
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


class LocalSGD:
    """Replace the weights by their mean over the groups, every `sync_steps` steps.

    https://arxiv.org/abs/1805.09767. The states of the optimizer stay as they are.
    """

    def __init__(self, parameters: Sequence[Tensor], sync_steps: int) -> None:
        self._parameters = parameters
        self._sync_steps = sync_steps

    def is_due(self, step: int) -> bool:
        return step % self._sync_steps == 0

    def applies(self, step: int) -> bool:
        return self.is_due(step)

    def values(self, step: int) -> list[Tensor]:
        return [local_shard(parameter).clone() for parameter in self._parameters]

    @torch.no_grad()
    def apply(self, step: int, means: list[Tensor]) -> None:
        for parameter, mean in zip(self._parameters, means, strict=True):
            local_shard(parameter).copy_(mean)

    def reset(self) -> None:
        """Start from the current weights."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """There is no state."""


class DiLoCo:
    """Move the weights of the last synchronization by the mean change of the groups.

    The change of a group is the outer gradient w - w', where w are the weights after the last
    synchronization and w' the weights now. An outer SGD with Nesterov momentum updates w. Then the
    weights are w + fragment_update_alpha (w' - w). See https://arxiv.org/abs/2311.08105, and
    https://arxiv.org/abs/2501.18512 for fragments: one of n fragments is synchronized every
    sync_steps / n steps. Its change is sent `fragment_sync_delay` steps before.

    fragments: the named parameters of each fragment.
    """

    def __init__(
        self, fragments: Sequence[Sequence[tuple[str, Tensor]]], section: FaultTolerance
    ) -> None:
        self._fragments = [[parameter for _, parameter in fragment] for fragment in fragments]
        self._names = [[name for name, _ in fragment] for fragment in fragments]
        self._period = section.sync_steps // len(fragments)
        self._delay = section.fragment_sync_delay
        self._alpha = section.fragment_update_alpha
        self._originals = [
            [parameter.detach().clone() for parameter in fragment] for fragment in self._fragments
        ]
        self._momenta = [
            [torch.zeros_like(parameter) for parameter in fragment] for fragment in self._originals
        ]

    def is_due(self, step: int) -> bool:
        return (step + self._delay) % self._period == 0

    def applies(self, step: int) -> bool:
        return step % self._period == 0

    def _fragment(self, step: int) -> int:
        """Return the fragment that is synchronized after `step`."""
        return (step // self._period - 1) % len(self._fragments)

    def values(self, step: int) -> list[Tensor]:
        index = self._fragment(step + self._delay)
        pairs = zip(self._originals[index], self._fragments[index], strict=True)
        with torch.no_grad():
            return [local_shard(original) - local_shard(parameter) for original, parameter in pairs]

    @torch.no_grad()
    def apply(self, step: int, means: list[Tensor]) -> None:
        index = self._fragment(step)
        for parameter, original, momentum, mean in zip(
            self._fragments[index],
            self._originals[index],
            self._momenta[index],
            means,
            strict=True,
        ):
            weights, start, buffer = (
                local_shard(parameter),
                local_shard(original),
                local_shard(momentum),
            )
            gradient = mean.to(start.device)
            buffer.mul_(OUTER_MOMENTUM).add_(gradient)
            start.sub_(gradient.add(buffer, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)
            weights.copy_(torch.lerp(start, weights, self._alpha))

    @torch.no_grad()
    def reset(self) -> None:
        """Start from the current weights."""
        for originals, fragment in zip(self._originals, self._fragments, strict=True):
            for original, parameter in zip(originals, fragment, strict=True):
                local_shard(original).copy_(local_shard(parameter))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live tensors, under TorchTitan's names of the fragments."""
        state: dict[str, Tensor] = {}
        for index, names in enumerate(self._names):
            key = f"StreamingDiLoCoFragment_{index}"
            for kind, tensors in (
                ("original_parameters", self._originals[index]),
                ("outer_optimizer", self._momenta[index]),
            ):
                pairs = zip(names, tensors, strict=True)
                state |= {f"{key}.{kind}.{name}": tensor for name, tensor in pairs}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy a loaded state into the live one. Tensors that were read in place are skipped."""
        for name, tensor in self.state_dict().items():
            if state_dict[name] is not tensor:
                tensor.copy_(state_dict[name])


Method = LocalSGD | DiLoCo


def build_semi_sync(
    named: Sequence[tuple[str, Tensor]],
    section: FaultTolerance,
    fragments: Sequence[Sequence[str]],
) -> Method:
    """Build the method `fault_tolerance.semi_sync_method`.

    fragments: names of the modules of each model fragment.
    """
    if section.semi_sync_method == "local_sgd":
        return LocalSGD([parameter for _, parameter in named], section.sync_steps)
    members = [
        [
            (name, parameter)
            for name, parameter in named
            if any(name.startswith(f"{module}.") for module in fragment)
        ]
        for fragment in fragments
    ]
    return DiLoCo(members, section)
