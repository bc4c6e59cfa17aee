"""Adam, AdamW and Lion with states in any dtype, and bfloat16 weights that keep small updates.

The update of an element depends on no other element, so that each rank updates its own shards.
Everything is computed in float32, or in float64 for float64 weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torchtitan_like.util.shards import local_shard
from torchtitan_like.util.splitmix import SIGNED_GAMMA, scramble_tensor, tensor_key

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.optim.groups import ParameterGroup


# For each dimension of a parameter, the indices in the full parameter of this rank's positions.
ShardIndices = Callable[[Tensor], Sequence[Tensor]]


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


class Elementwise(GatedOptimizer):
    """The base class of `Adam`, `AdamW` and `Lion`.

    The state of a parameter has a count `step` of updates (0-dim float32), the tensors of
    `state_names`, and `compensation` with `bf16_rounding = "kahan"`: what rounding to the bfloat16
    weight has lost, itself in bfloat16 (Zamirai et al. 2020, arXiv:2010.06192).
    """

    state_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        groups: list[ParameterGroup],
        section: OptimizerSection,
        shard_indices: ShardIndices,
        seed: int,
    ) -> None:
        """Build the state. seed: of stochastic rounding."""
        super().__init__([group.as_torch() for group in groups], {})
        self._section = section
        self._seed = seed
        self._names = {p: name for group in groups for name, p in group.members}
        self._indices: dict[Tensor, list[Tensor]] = {}  # on the device: a copy would wait for it
        if section.bf16_rounding == "stochastic":
            self._indices = {
                p: [positions.to(p.device) for positions in shard_indices(p)] for p in self._names
            }
        for p in self._names:
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            self.state[p] |= self.new_states(p)
            if section.bf16_rounding == "kahan" and p.dtype == torch.bfloat16:
                self.state[p]["compensation"] = torch.zeros_like(p)

    def new_states(self, p: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter: zeros."""
        section = self._section
        dtype = getattr(torch, section.state_dtype) if section.state_dtype else None
        return {name: torch.zeros_like(p, dtype=dtype) for name in self.state_names}

    def read_state(self, name: str, live: dict[str, Tensor]) -> Tensor:
        """Return a state of this rank's shard of a parameter. live: all its stored tensors."""
        return live[name]

    def stored_state(self, name: str, value: Tensor, live: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that store a state, by their names in `live`."""
        return {name: value}

    @abstractmethod
    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Return the new weight, and put new tensors into `state`.

        All are of the dtype of the computation. state: `step` of this update, and `state_names`.
        """

    @torch.no_grad()
    def gated_step(self, skip: Tensor) -> None:
        """Update all weights and states unless `skip` is 1."""
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, group, skip)

    def _update(self, p: Tensor, group: dict[str, Any], skip: Tensor) -> None:
        assert p.grad is not None
        weight = local_shard(p)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        live = {name: local_shard(value) for name, value in self.state[p].items()}
        state = {"step": (live["step"] + 1).to(dtype)}
        state |= {name: self.read_state(name, live).to(dtype) for name in self.state_names}
        old = weight.to(dtype)
        if "compensation" in live:
            old = old + live["compensation"]
        new = self.update(old, local_shard(p.grad).to(dtype), state, group)
        if "compensation" in live:
            assign(live["compensation"], new - new.to(weight.dtype), skip)
        targets = {"weight": weight} | live
        values = {"weight": new, "step": state["step"]}
        for name in self.state_names:
            values |= self.stored_state(name, state[name], live)
        if self._section.bf16_rounding == "stochastic":
            values = self._round(p, targets, values)
        for name, value in values.items():
            assign(targets[name], value, skip)

    def _round(
        self, p: Tensor, targets: dict[str, Tensor], values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the values, of which those for bfloat16 targets are rounded stochastically."""
        names = [name for name in values if targets[name].dtype == torch.bfloat16]
        if not names:
            return values
        index = torch.zeros((), dtype=torch.int64, device=p.device)
        for size, positions in zip(p.shape, self._indices[p], strict=True):
            index = index.unsqueeze(-1) * size + positions
        rounded = {}
        for name in names:
            key = tensor_key(self._seed, f"{self._names[p]}.{name}")
            bits = random_bits(key, values["step"], index)
            rounded[name] = round_stochastically(values[name], bits)
        return values | rounded


class Adam(Elementwise):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), whose weight decay is part of the gradient."""

    state_names = ("exp_avg", "exp_avg_sq")

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Return the new weight, and put new means into `state`."""
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * weight
        return weight.sub(self._change(grad, state, group))

    def _change(self, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        beta1, beta2, step = self._section.beta1, self._section.beta2, state["step"]
        mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
        square = torch.lerp(state["exp_avg_sq"], grad * grad, 1 - beta2)
        state["exp_avg"], state["exp_avg_sq"] = mean, square
        eps = self._section.eps * group["eps_factor"]
        denominator = (square / (1 - beta2**step)).sqrt() + eps
        return mean.mul(group["lr"]).div((1 - beta1**step) * denominator)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Return the new weight, and put new means into `state`."""
        decayed = weight.mul(1 - group["lr"] * group["weight_decay"])
        return decayed.sub(self._change(grad, state, group))


class Lion(Elementwise):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2) with decoupled weight decay."""

    state_names = ("exp_avg",)

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Return the new weight, and put the new mean into `state`."""
        direction = torch.lerp(state["exp_avg"], grad, 1 - self._section.lion_beta1).sign()
        state["exp_avg"] = torch.lerp(state["exp_avg"], grad, 1 - self._section.lion_beta2)
        decayed = weight.mul(1 - group["lr"] * group["weight_decay"])
        return decayed.sub(direction, alpha=group["lr"])


def random_bits(key: int, step: Tensor, index: Tensor) -> Tensor:
    """Return 16 random bits for each element, as int32.

    key: of the tensor. step: 0-dim, number of the update. index: int64, of the elements in the
    full tensor.
    """
    start = scramble_tensor(step.to(torch.int64) * SIGNED_GAMMA + key)
    return (scramble_tensor(start + index * SIGNED_GAMMA) & 0xFFFF).to(torch.int32)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 numbers. The expectation is the exact value.

    bits: 16 random bits for each element, int32. An inf or nan stays one.
    """
    raised = (values.view(torch.int32) + bits) & -0x10000
    rounded = torch.where(values.isfinite(), raised.view(torch.float32), values)
    return rounded.to(torch.bfloat16)
