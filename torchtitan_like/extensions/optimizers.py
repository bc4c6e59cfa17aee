"""Build the optimizers of user code, and check that they follow `OptimizerBuilder`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.util import registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_KEYS = ("lr", "peak_lr", "group", "weight_decay")


class ExtensionError(Exception):
    """A registered function or class does not follow its protocol."""


def build_optimizer(
    name: str, groups: list[dict[str, Any]], settings: Settings
) -> torch.optim.Optimizer:
    """Build the registered optimizer. groups: see `OptimizerBuilder`.

    Raises ExtensionError if it does not follow the protocol.
    """
    import torch

    given = {parameter for group in groups for _, parameter in group["params"]}
    optimizer = registry.find("optimizer", name)(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problems = [f"it is {type(optimizer).__name__}, not a torch.optim.Optimizer"]
    else:
        problems = list(_problems(optimizer, given))
    if problems:
        raise ExtensionError(
            f"the optimizer {name!r} ({registry.origin_of('optimizer', name)}): "
            f"{'; '.join(problems)}. Expected an optimizer over the given groups, with its whole "
            "state: correct its constructor"
        )
    return optimizer  # type: ignore[no-any-return]


def _problems(optimizer: torch.optim.Optimizer, given: set[Tensor]) -> Iterator[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if set(parameters) != given or len(parameters) != len(given):
        yield f"it has {len(parameters)} parameters of the {len(given)} given ones"
        return
    for group in optimizer.param_groups:
        if missing := [key for key in GROUP_KEYS if key not in group]:
            yield f"a group of its param_groups has lost {', '.join(missing)}"
            return
    for p in parameters:
        for key, value in optimizer.state.get(p, {}).items():
            if problem := _state_problem(p, value):
                yield f"its state {key!r} {problem}"
                return


def _state_problem(parameter: Any, value: Any) -> str:
    """Return what is wrong with a state of a parameter, or ""."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, not a tensor: a checkpoint would not contain it"
    is_sharded = hasattr(parameter, "placements")
    if is_sharded and value.ndim and not hasattr(value, "placements"):
        return (
            "is a plain tensor of a sharded parameter: a checkpoint would contain the shard of one "
            "rank (torch.zeros_like(parameter) returns a DTensor)"
        )
    if value.device != parameter.device:
        return f"is on {value.device}, not on {parameter.device} like its parameter"
    return ""


def try_optimizer(name: str, parameters: list[tuple[str, int]], settings: Settings) -> None:
    """Build the optimizer over small parameters, and take two steps.

    parameters: names and numbers of dimensions. Raises ExtensionError if the state changes its
    tensors in a step, or if a skipped update changes a weight or state; and the errors of user
    code.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    named = [(key, torch.rand((8,) * ndim, generator=generator)) for key, ndim in parameters]
    for _, parameter in named:
        parameter.requires_grad_()
    group = {"params": named, "lr": 1e-3, "peak_lr": 1e-3, "group": "", "weight_decay": 0.1}
    optimizer: Any = build_optimizer(name, [group], settings)
    tensors = _tensors(optimizer, named)
    for skip in (0.0, 1.0):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        if hasattr(optimizer, "gated_step"):
            optimizer.gated_step(torch.tensor(skip))
        elif not skip:
            optimizer.step()
        after = _tensors(optimizer, named)
        if new := [key for key, tensor in after.items() if tensor is not tensors.get(key)]:
            raise ExtensionError(
                f"the optimizer {name!r} replaces or adds {', '.join(new[:3])} in a step. Expected "
                "tensors that exist after building and are updated in place, because a checkpoint "
                "is loaded into them: create them in the constructor"
            )
        if skip and any(not torch.equal(before[key], after[key]) for key in before):
            raise ExtensionError(
                f"gated_step of the optimizer {name!r} changes weights or state with skip = 1. "
                "Expected equal bits: write with optim.gated.assign"
            )


def _tensors(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the weights and states by name."""
    states = {
        f"the state {state!r} of {key}": tensor
        for key, parameter in named
        for state, tensor in optimizer.state.get(parameter, {}).items()
    }
    return {f"the weight {key}": parameter for key, parameter in named} | states
