"""Adam, AdamW and Lion with states in any dtype, and bfloat16 weights that keep small updates.

The update of an element depends on no other element, so that each rank updates its own shards.
Everything is computed in float32, or in float64 for float64 weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan_like.optim.groups import block_of
from torchtitan_like.util.compile import fused_on_gpu
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
    _step_supports_amp_scaling = True  # the next step divides gradients by `grad_scale`
    grad_scale: Tensor | None = None
    coder: Any = None  # reads and stores coded states

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
        self._places: dict[Tensor, Place] = {}
        if section.bf16_rounding == "stochastic":
            self._places = {p: self._find_place(p, shard_indices) for p in self._names}
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

    @staticmethod
    @abstractmethod
    def update(
        weight: Tensor, grad: Tensor, state: dict[str, Tensor], settings: Settings
    ) -> Tensor:
        """Return the new weight, and put new tensors into `state`.

        All are of the dtype of the computation. state: `step` of this update, and `state_names`.
        """

    @torch.no_grad()
    def gated_step(self, skip: Tensor) -> None:
        """Divide gradients by `grad_scale`, and update weights and states unless `skip` is 1."""
        divisor, self.grad_scale = self.grad_scale, None
        for group in self.param_groups:
            parameters = group["params"]
            steps = [self.state[p]["step"] for p in parameters]
            torch._foreach_add_(steps, [1 - skip] * len(steps))
            lr = group["lr"]
            if not skip.is_cpu:  # a number would be part of the compiled code
                lr = torch.full((), lr, dtype=torch.float64, device=skip.device)
            eps = self._section.eps * group["eps_factor"]
            settings = Settings(self._section, lr, group["weight_decay"], eps)
            for _, block in groupby(parameters, lambda p: block_of(self._names[p])):
                shards = [self._shard(p) for p in block]
                _update_all(
                    shards, self.state_names, self.update, settings, self.coder, divisor, skip
                )

    def _shard(self, p: Tensor) -> Shard:
        assert p.grad is not None
        live = {name: local_shard(value) for name, value in self.state[p].items()}
        return Shard(live | {"weight": local_shard(p)}, local_shard(p.grad), self._places.get(p))

    def _find_place(self, p: Tensor, shard_indices: ShardIndices) -> Place:
        """Return where a shard is, on the device: a copy in a step would wait for it."""
        keys = {
            name: torch.tensor(tensor_key(self._seed, f"{self._names[p]}.{name}"), device=p.device)
            for name in ("weight", *self.state_names)
        }
        return Place(tuple(p.shape), [i.to(p.device) for i in shard_indices(p)], keys)


class Settings(NamedTuple):
    """The settings of an update. lr: on a GPU 0-dim float64, else a number."""

    section: OptimizerSection
    lr: Any
    weight_decay: float
    eps: float


class Place(NamedTuple):
    """The elements of a shard in the full parameter, for stochastic rounding.

    shape: of the parameter. positions: see `ShardIndices`. keys: of random numbers, 0-dim int64, by
    the name of the tensor.
    """

    shape: tuple[int, ...]
    positions: list[Tensor]
    keys: dict[str, Tensor]


class Shard(NamedTuple):
    """This rank's shard of a parameter. live: its weight and all its stored states."""

    live: dict[str, Tensor]
    grad: Tensor
    place: Place | None


@fused_on_gpu
def _update_all(
    shards: list[Shard],
    state_names: tuple[str, ...],
    update: Callable[..., Tensor],
    settings: Settings,
    coder: Any,
    divisor: Tensor | None,
    skip: Tensor,
) -> None:
    """Update the weights and states of a block unless `skip` is 1.

    On a GPU, one kernel reads and writes each element of a parameter and its states once. Blocks of
    equal shapes share the compiled code: that of all parameters of a model would compile too long.
    """
    for live, grad, place in shards:
        weight = live["weight"]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad = grad.to(dtype)
        if divisor is not None:
            grad = grad / divisor
        state = {"step": live["step"].to(dtype)}
        for name in state_names:
            stored = live[name] if name in live else coder.decode(name, live)
            state[name] = stored.to(dtype)
        old = weight.to(dtype)
        if "compensation" in live:
            old = old + live["compensation"]
        new = update(old, grad, state, settings)
        if "compensation" in live:
            assign(live["compensation"], new - new.to(weight.dtype), skip)
        values = {"weight": new}
        for name in state_names:
            value = state[name]
            values |= {name: value} if name in live else coder.encode(name, value)
        for name, value in values.items():
            target = live[name]
            if place is not None and target.dtype == torch.bfloat16:
                value = _round(value, live["step"], place, name)
            assign(target, value, skip)


def _round(value: Tensor, step: Tensor, place: Place, name: str) -> Tensor:
    """Round the new value of a tensor to bfloat16 stochastically."""
    index = torch.zeros((), dtype=torch.int64, device=value.device)
    for size, positions in zip(place.shape, place.positions, strict=True):
        index = index.unsqueeze(-1) * size + positions
    return round_stochastically(value, random_bits(place.keys[name], step, index))


class Adam(Elementwise):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), whose weight decay is part of the gradient."""

    state_names = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: dict[str, Tensor], settings: Settings
    ) -> Tensor:
        """Return the new weight, and put new means into `state`."""
        if settings.weight_decay:
            grad = grad + settings.weight_decay * weight
        return weight.sub(_adam_change(grad, state, settings))


def _adam_change(grad: Tensor, state: dict[str, Tensor], settings: Settings) -> Tensor:
    """Return what Adam subtracts from the weight, and put new means into `state`."""
    beta1, beta2, step = settings.section.beta1, settings.section.beta2, state["step"]
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.lerp(state["exp_avg_sq"], grad * grad, 1 - beta2)
    state["exp_avg"], state["exp_avg_sq"] = mean, square
    denominator = (square / (1 - beta2**step)).sqrt() + settings.eps
    return mean.mul(settings.lr).div((1 - beta1**step) * denominator)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: dict[str, Tensor], settings: Settings
    ) -> Tensor:
        """Return the new weight, and put new means into `state`."""
        decayed = weight.mul(1 - settings.lr * settings.weight_decay)
        return decayed.sub(_adam_change(grad, state, settings))


class Lion(Elementwise):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2) with decoupled weight decay."""

    state_names = ("exp_avg",)

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: dict[str, Tensor], settings: Settings
    ) -> Tensor:
        """Return the new weight, and put the new mean into `state`."""
        section = settings.section
        direction = torch.lerp(state["exp_avg"], grad, 1 - section.lion_beta1).sign()
        state["exp_avg"] = torch.lerp(state["exp_avg"], grad, 1 - section.lion_beta2)
        decayed = weight.mul(1 - settings.lr * settings.weight_decay)
        return decayed.sub(direction * settings.lr)


def random_bits(key: int | Tensor, step: Tensor, index: Tensor) -> Tensor:
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
