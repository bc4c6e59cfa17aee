"""Split parameters into groups with the same optimizer and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torchtitan_like.models.spec import MATRIX_ROLES, Scale, ScaleOf, unscaled

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.models.hf_table import Table


class ParameterGroup(NamedTuple):
    """Parameters with the same optimizer and hyperparameters.

    name: of the table in `[optimizer.groups]`; "" for parameters in no group.
    optimizer: a name in `optimizer.OPTIMIZERS`, or "module:name".
    members: the parameters by their canonical names.
    eps_factor: of `optimizer.eps`.
    """

    name: str
    optimizer: str
    lr: float
    weight_decay: float
    members: list[tuple[str, Tensor]]
    eps_factor: float = 1.0

    def as_torch(self) -> dict[str, Any]:
        """Return the group as torch's optimizers read it; `peak_lr` is what the schedule scales."""
        return {
            "params": [parameter for _, parameter in self.members],
            "lr": self.lr,
            "peak_lr": self.lr,
            "group": self.name,
            "weight_decay": self.weight_decay,
            "eps_factor": self.eps_factor,
        }

    def as_named(self) -> dict[str, Any]:
        """Return the group with pairs of names and parameters, as torch's optimizers take them."""
        return self.as_torch() | {"params": list(self.members)}


def group_parameters(
    named: Iterable[tuple[str, Tensor]],
    section: OptimizerSection,
    sharding: Table,
    scale_of: ScaleOf = unscaled,
) -> list[ParameterGroup]:
    """Split parameters by `[optimizer.groups]`, `optimizer.no_weight_decay`, shape and scale.

    In a group with Muon, the parameters that are no matrices of hidden layers have AdamW.
    sharding, scale_of: `ModelSpec.sharding` and `scale`. AdamW multiplies weight decay by the
    learning rate. Division by the factor of the learning rate keeps the product, so that a weight
    decays over as many steps as in the base model (arXiv:2405.13698).
    Raises ValueError if a parameter is in two groups.
    """
    groups: dict[tuple[str, str, bool, Scale], ParameterGroup] = {}
    for name, parameter in named:
        matching = section.groups_of(name)
        if len(matching) > 1:
            raise ValueError(
                f"{name} is in the parameter groups {' and '.join(matching)}. Expected at most one "
                f"group: change optimizer.groups.{matching[1]}.parameters"
            )
        settings = section.settings_of(matching[0] if matching else "")
        assert settings.name is not None
        assert settings.lr is not None
        assert settings.weight_decay is not None
        optimizer: str = settings.name
        if optimizer == "Muon" and not is_hidden_matrix(name, parameter.ndim, sharding):
            optimizer = "AdamW"
        is_exempt = any(fnmatchcase(name, pattern) for pattern in section.no_weight_decay)
        scale = scale_of(name, parameter.ndim)._replace(std=1.0)  # of initial weights only
        key = (matching[0] if matching else "", optimizer, is_exempt, scale)
        if key not in groups:
            weight_decay = 0.0 if is_exempt else settings.weight_decay / scale.lr
            lr = settings.lr * scale.lr
            groups[key] = ParameterGroup(key[0], optimizer, lr, weight_decay, [], scale.eps)
        groups[key].members.append((name, parameter))
    return list(groups.values())


def is_hidden_matrix(name: str, ndim: int, sharding: Table) -> bool:
    """Return True for a weight that Muon updates: a matrix, or stacked ones, of a hidden layer."""
    role = next((role for pattern, role in sharding if fnmatchcase(name, pattern)), "")
    return MATRIX_ROLES.get(role) == ndim


def block_of(name: str) -> str:
    """Return a parameter's block, such as `layers.3` of `layers.3.attention.wq.weight`.

    Outside of a list of layers, the block is the first module: `output` of `output.weight`.
    """
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return f"{first}.{second}" if second.isdigit() else first
