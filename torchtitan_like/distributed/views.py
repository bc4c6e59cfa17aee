"""Parameter views: the tensors that a module's own code reads instead of its parameters.

For initial weights, optimizers, checkpoints, and FSDP2, parameters are DTensors. Module code
computes with plain local tensors, which it reads under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

View = Callable[[Any], Tensor]

# One class for all modules of a class: their compiled code checks the class.
_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def view_parameter(module: nn.Module, name: str, view: View) -> None:
    """Make `module.<name>` return `view(parameter)` of the parameter's current tensor.

    `named_parameters()`, `state_dict()`, and `_parameters` still hold the parameter itself. Views
    are applied in the reverse order of their registration. So a view starts with `to_local`, which
    accepts parameters and local tensors. Modules that share one compilation must share their views.

    Raises ValueError if the module has no such parameter.
    """
    if module._parameters.get(name) is None:
        raise ValueError(f"{type(module).__name__} has no parameter {name!r} to view")
    views: dict[str, tuple[View, ...]] = module.__dict__.setdefault("_parameter_views", {})
    if name not in views:
        key = (type(module), name)
        if key not in _classes:
            _classes[key] = _with_property(*key)
        module.__class__ = _classes[key]
    views[name] = (view, *views.get(name, ()))


def to_local(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor (its gradient has the same placement), or a plain tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


def on_local_parameters(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward`, compiled code of `module`: while it runs, viewed parameters are local tensors.

    Its graph then contains no DTensors, which is faster. It is also required: a checkpointed block
    that saves a DTensor's mesh does not run (torch 2.13). Views remain in the graph; all must be
    registered before the first call.

    Each call reads the buffers in a module's `changed_in_backward` through aliases of its own. The
    backward of one micro-batch changes them while others wait for theirs. Compiled code saves such
    buffers for the backward, and refuses one that has changed since (torch 2.13).
    """

    @cache
    def viewed() -> list[tuple[dict[str, Any], str]]:
        return [
            (owner._parameters, name)
            for owner in module.modules()
            for name in owner.__dict__.get("_parameter_views", ())
        ]

    @cache
    def changed() -> list[tuple[dict[str, Any], str]]:
        return [
            (owner._buffers, name)
            for owner in module.modules()
            for name in getattr(owner, "changed_in_backward", ())
        ]

    def run(*args: Any, **kwargs: Any) -> Any:
        entries = [(parameters, name, parameters[name]) for parameters, name in viewed()]
        buffers = [(tensors, name, tensors[name]) for tensors, name in changed()]
        replacements: list[Any] = [buffer.data for _, _, buffer in buffers]
        if entries:
            replacements[:0] = _SeparateGradients.apply(*(to_local(p) for _, _, p in entries))
        entries += buffers
        try:
            for (tensors, name, _), replacement in zip(entries, replacements, strict=True):
                tensors[name] = replacement
            return forward(*args, **kwargs)
        finally:
            for tensors, name, tensor in entries:
                tensors[name] = tensor

    return run


class _SeparateGradients(torch.autograd.Function):
    """Identity on tensors whose gradients never share memory.

    A compiled backward computes equal gradients once and returns one tensor for all of them.
    Autograd copies a gradient shared by two parameters, but does not look into DTensors (torch
    2.13). Clipping or accumulation in place would then apply twice.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        addresses: set[int] = set()
        separate: list[Tensor | None] = []
        for grad in grads:
            is_shared = grad is not None and grad.untyped_storage().data_ptr() in addresses
            separate.append(grad.clone() if grad is not None and is_shared else grad)
            if grad is not None:
                addresses.add(grad.untyped_storage().data_ptr())
        return tuple(separate)


def _with_property(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass of `cls` with a property for its parameter `name`."""

    def read(module: nn.Module) -> Any:
        value: Any = module._parameters[name]
        try:
            for view in module.__dict__["_parameter_views"][name]:
                value = view(value)
        except AttributeError as error:  # otherwise nn.Module returns the parameter itself
            raise RuntimeError(
                f"cannot view parameter {name!r} of {cls.__name__}: {error}"
            ) from error
        return value

    return type(cls.__name__, (cls,), {name: property(read), "__module__": cls.__module__})
