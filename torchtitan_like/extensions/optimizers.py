"""Build the optimizers of user code, and check that they follow `OptimizerBuilder`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan_like.extensions.names import ExtensionError, resolve_name
from torchtitan_like.extensions.protocols import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_KEYS = ("lr", "peak_lr", "group", "weight_decay")


def build_optimizer(
    name: str, groups: list[dict[str, Any]], settings: Settings
) -> torch.optim.Optimizer:
    """Build the user's optimizer. groups: see `OptimizerBuilder`.

    Raises ExtensionError if it does not follow the protocol.
    """
    import torch

    given = {parameter for group in groups for _, parameter in group["params"]}
    optimizer = resolve_name(name, "optimizer")(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problems = [f"it is {type(optimizer).__name__}, not a torch.optim.Optimizer"]
    else:
        problems = list(_problems(optimizer, given))
    if problems:
        raise ExtensionError(
            f"the optimizer {name}: {'; '.join(problems)}. Expected an optimizer over the given "
            "groups, with its whole state: correct its constructor"
        )
    _check_first_step(name, optimizer)
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


def _check_first_step(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ExtensionError in the first `step` if it adds or replaces tensors of the state."""
    before = _state_tensors(optimizer)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        handle.remove()
        if new := _state_tensors(optimizer).keys() - before.keys():
            keys = sorted({key for _, key, _ in new})
            raise ExtensionError(
                f"the optimizer {name} replaces or adds the state {', '.join(keys)} in a step. "
                "Expected tensors that exist after building and are updated in place, because a "
                "checkpoint is loaded into them: create them in the constructor"
            )

    handle = optimizer.register_step_post_hook(check)


def _state_tensors(optimizer: torch.optim.Optimizer) -> dict[tuple[Tensor, str, int], Tensor]:
    """Return the tensors of the state by parameter, key and identity."""
    return {
        (parameter, key, id(value)): value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
