"""Balance the loads of experts after each optimizer step, using the choices of the whole step.

Backward counts each rank's choices (`models.layers.moe.MoE`). Counts are integers, so their sum over
ranks and micro-batches is the same on every layout, and so are the biases to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_like.models.layers.balance import load_fractions
from torchtitan_like.models.layers.moe import MoE
from torchtitan_like.util.compile import fused_on_gpu

if TYPE_CHECKING:
    from torchtitan_like.distributed.world import World
    from torchtitan_like.models.layers.balance import Balance


class ExpertLoads(NamedTuple):
    """The routing of one step on all ranks, on the host, with an entry for each MoE layer.

    choices: for each expert, the number of tokens that chose it.
    router_z: mean over tokens of logsumexp(logits)^2.
    aux_loss: mean over tokens of the balance loss without its coefficient; 1 if loads are even.
        None without such a loss.
    bias_range: largest bias minus smallest bias; None without biases.
    """

    choices: list[list[int]]
    router_z: list[float]
    aux_loss: list[float] | None
    bias_range: list[float] | None


class _Layer(NamedTuple):
    """Description of an MoE layer, which may be on another pipeline stage."""

    number: int
    num_experts: int
    balance: Balance
    has_bias: bool


class ExpertBalancer:
    """Updates the biases or load fractions of this rank's MoE layers after each step.

    One all-reduce over all ranks sums the choices of all layers; without balancing, at log steps
    only. A skipped step changes no bias and no fraction.
    """

    def __init__(
        self,
        parts: Iterable[nn.Module],
        world: World,
        *,
        sequence_parallel: bool,
    ) -> None:
        """Find the layers, and let their backward add the router's losses.

        A collective with pipeline parallelism. Raises ValueError if layers have different numbers
        of experts, or are balanced differently.
        """
        parts = list(parts)
        self._modules = _find_layers(parts)
        layers = own = describe_layers(parts)
        if world.dims.pp > 1:
            of_ranks = world.step_group.gather_objects(own)
            layers = {name: layer for part in of_ranks for name, layer in part.items()}
        names = sorted(layers, key=lambda name: layers[name].number)
        self.layers = [layers[name] for name in names]
        if len({layer._replace(number=0) for layer in self.layers}) > 1:
            raise ValueError(
                "MoE layers differ in their number of experts or their balance. Expected equal "
                f"layers: {self.layers}. Build all of them with the same arguments"
            )
        self._rows = torch.tensor(
            [names.index(name) for name in self._modules], dtype=torch.int64, device=world.device
        )
        self._group = world.all_ranks
        self._device = world.device
        self._num_tokens = 1
        # Without sequence parallelism, all tensor-parallel ranks route the same tokens.
        self._is_counted = sequence_parallel or world.coordinate("tp") == 0
        coordinates = ("dp_replicate", "dp_shard", "cp", "tp")
        self._is_first_replica = not any(world.coordinate(name) for name in coordinates)
        self._logged: tuple[Tensor, Tensor] | None = None
        self._loss_scale = torch.ones((), dtype=torch.float64, device=world.device)
        for module in self._modules.values():
            module.loss_scale = self._loss_scale

    def prepare(self, num_tokens: int) -> None:
        """Call before the forward of a step, with the number of its tokens on all ranks."""
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._loss_scale.fill_(1 / num_tokens)

    @torch.no_grad()
    def update(self, skip: Tensor, is_logged: bool) -> None:
        """Balance by the choices since the last call, unless `skip` (0-dim, 0 or 1) is 1.

        A collective, which does not wait for the device. `is_logged`: `read` will follow.
        """
        if is_logged or self.layers[0].balance.method in ("bias", "global"):
            choices = self._sum_choices()
            if self._modules:
                self._balance(choices[self._rows], skip)
            self._logged = (choices, self._sum_losses()) if is_logged else None
        self.forget_choices()

    def forget_choices(self) -> None:
        """Set the counts of this rank to 0."""
        modules = self._modules.values()
        if modules:
            torch._foreach_zero_([module.tokens_per_expert for module in modules])
            torch._foreach_zero_([module.router_sums for module in modules])

    def read(self) -> ExpertLoads:
        """Return the routing of the last step, for which `is_logged` was True. Waits for the device."""
        assert self._logged is not None, "update(..., is_logged=True) has not been called"
        choices, sums = (tensor.cpu() for tensor in self._logged)
        aux_loss, router_z, bias_range = (column.tolist() for column in sums.T)
        return ExpertLoads(
            choices.tolist(),
            [z / self._num_tokens for z in router_z],
            [loss / self._num_tokens for loss in aux_loss]
            if self.layers[0].balance.has_loss
            else None,
            bias_range if self.layers[0].has_bias else None,
        )

    def named_state(self) -> dict[str, Tensor]:
        """Return the live biases and load fractions, which are equal on all ranks that have them."""
        return {
            f"{name}.{key}": tensor
            for name, module in self._modules.items()
            for key in ("expert_bias", "load_fractions")
            if (tensor := module._buffers[key]) is not None
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live load fractions by name, in the format of the optimizer's state.

        The biases are stored with the weights.
        """
        return {
            f"state.{name}": value
            for name, value in self.named_state().items()
            if name.endswith(".load_fractions")
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy a loaded state into the live state. Tensors that were read in place are skipped."""
        for name, value in self.state_dict().items():
            if value is not state_dict[name]:
                value.copy_(state_dict[name])

    def _sum_choices(self) -> Tensor:
        """Return the choices of all ranks: (all layers, experts) int64."""
        shape = (len(self.layers), self.layers[0].num_experts)
        choices = torch.zeros(shape, dtype=torch.int64, device=self._device)
        if self._is_counted and self._modules:
            counts = [module.tokens_per_expert for module in self._modules.values()]
            choices[self._rows] = torch.stack(counts)
        return self._sum_over_ranks(choices)

    def _sum_losses(self) -> Tensor:
        """Return sums over all tokens, and ranges of biases: (all layers, 3) float64."""
        values = torch.zeros((len(self.layers), 3), dtype=torch.float64, device=self._device)
        modules = list(self._modules.values())
        if self._is_counted and modules:
            values[self._rows, :2] = torch.stack([module.router_sums for module in modules])
        if self._is_first_replica and modules and self.layers[0].has_bias:
            biases = torch.stack(_tensors(modules, "expert_bias"))
            values[self._rows, 2] = (biases.amax(1) - biases.amin(1)).to(values.dtype)
        return self._sum_over_ranks(values)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def _balance(self, choices: Tensor, skip: Tensor) -> None:
        """Update the state of this rank's layers. choices: (own layers, experts)."""
        balance, modules = self.layers[0].balance, list(self._modules.values())
        skip = skip.to(choices.device)
        if balance.method == "bias":
            changes = bias_changes(choices, balance.coeff) * (1 - skip.to(torch.float32))
            torch._foreach_add_(_tensors(modules, "expert_bias"), list(changes.unbind()))
        elif balance.method == "global":
            fractions = _tensors(modules, "load_fractions")
            old = torch.stack(fractions)
            new = torch.where(skip > 0, old, load_fractions(choices, old.dtype))
            torch._foreach_copy_(fractions, list(new.unbind()))


@fused_on_gpu
def bias_changes(choices: Tensor, coeff: float) -> Tensor:
    """Return the changes of biases, float32: `coeff` up below the mean load, or down above it.

    choices: (layers, experts) int64. The mean of a layer's changes is subtracted, so that its
    biases do not drift together. Comparisons are between integers: next to a rounded mean, equal
    loads could differ.
    """
    num_experts = choices.shape[-1]
    signs = torch.sign(choices.sum(-1, keepdim=True) - num_experts * choices)
    centered = signs * num_experts - signs.sum(-1, keepdim=True)
    return (coeff * (centered.to(torch.float64) / num_experts)).to(torch.float32)


def _tensors(modules: Iterable[MoE], buffer: str) -> list[Tensor]:
    return [tensor for module in modules if (tensor := module._buffers[buffer]) is not None]


def describe_layers(parts: Iterable[nn.Module]) -> dict[str, _Layer]:
    """Return a description of each MoE layer by fqn."""
    return {name: _describe(name, module) for name, module in _find_layers(parts).items()}


def _find_layers(parts: Iterable[nn.Module]) -> dict[str, MoE]:
    return {
        name: module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, MoE)
    }


def _describe(name: str, module: MoE) -> _Layer:
    number = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    return _Layer(number, module.experts.num_experts, module.balance, module.has_bias)
