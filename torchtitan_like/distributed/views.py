"""What a module's own code sees in place of its parameter.

Parameters are DTensors for all that looks at a model from outside: initial weights, optimizers, checkpoints, FSDP2.
Module code computes with plain local tensors, which it finds under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

View = Callable[[Any], Tensor]

# One class for all modules of a class, as their compiled code checks it.
_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def view_parameter(module: nn.Module, name: str, view: View) -> None:
    """Make `module.<name>` read `view(parameter)`, whatever tensor stands in the parameter's place at that time.

    `named_parameters()`, `state_dict()` and `_parameters` go on to hold the parameter itself. A second view of the same
    name sees the parameter, and the first one sees what the second returns: so a view begins with `to_local`, which takes
    both. Modules that are to share one compilation share their views too. Raises ValueError when there is no such parameter.
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
    """The local tensor of a DTensor, whose gradient is placed as the DTensor is; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


def on_local_parameters(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled code of `module`, with local tensors in the place of viewed parameters as long as it runs.

    Its graph then knows nothing of DTensors, which is faster, and without which a checkpointed block with a DTensor's mesh
    among what it saves does not run (torch 2.13). Views stay in the graph; all must be there at the first call.
    """

    @cache
    def viewed() -> list[tuple[dict[str, Any], str]]:
        return [
            (owner._parameters, name)
            for owner in module.modules()
            for name in owner.__dict__.get("_parameter_views", ())
        ]

    def run(*args: Any, **kwargs: Any) -> Any:
        places = [(parameters, name, parameters[name]) for parameters, name in viewed()]
        if not places:
            return forward(*args, **kwargs)
        locals_ = _WithOwnGradients.apply(*(to_local(parameter) for _, _, parameter in places))
        try:
            for (parameters, name, _), local in zip(places, locals_, strict=True):
                parameters[name] = local
            return forward(*args, **kwargs)
        finally:
            for parameters, name, parameter in places:
                parameters[name] = parameter

    return run


class _WithOwnGradients(torch.autograd.Function):
    """Tensors as they are, whose gradients are never one tensor.

    A compiled backward computes equal gradients once and returns the result for each of them. Autograd takes care that what
    it hands to two parameters is not changed for both when it is changed for one, but does not look into DTensors (torch
    2.13): clipped or accumulated into, such a gradient would be so twice.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        taken: set[int] = set()
        own: list[Tensor | None] = []
        for grad in grads:
            is_taken = grad is not None and grad.untyped_storage().data_ptr() in taken
            own.append(grad.clone() if grad is not None and is_taken else grad)
            if grad is not None:
                taken.add(grad.untyped_storage().data_ptr())
        return tuple(own)


def _with_property(cls: type[nn.Module], name: str) -> type[nn.Module]:
    """A class like `cls` with a property for its parameter `name`."""

    def look(module: nn.Module) -> Any:
        value: Any = module._parameters[name]
        try:
            for view in module.__dict__["_parameter_views"][name]:
                value = view(value)
        except AttributeError as error:  # else nn.Module would look elsewhere and hand out the parameter itself
            raise RuntimeError(f"cannot view parameter {name!r} of {cls.__name__}: {error}") from error
        return value

    return type(cls.__name__, (cls,), {name: property(look), "__module__": cls.__module__})
