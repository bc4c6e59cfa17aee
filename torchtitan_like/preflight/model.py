"""The model's name, flavor and sizes, and the names of its parameters."""

from __future__ import annotations

import importlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torchtitan_like.config.layout_rules import MODEL_KEYS
from torchtitan_like.config.problems import nearest

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.models.spec import ModelSpec


def check_model(findings: Findings) -> tuple[ModelSpec | None, Any]:
    """Name, flavor and sizes; returns the model and its arguments (None, None if there is no such model)."""
    from torchtitan_like.models.spec import get_spec, resolve_args

    section = findings.config.model
    module = findings.config.experimental.custom_import
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the user's module raises is the user's answer
            problem = f"{type(error).__name__}: {error}"
            findings.error("experimental.custom_import", f"a module that can be imported; {problem}")
            return None, None
    try:
        spec = get_spec(section.name)
    except KeyError as error:
        findings.error("model.name", f"a registered model: {error.args[0]}", involves=("experimental.custom_import",))
        return None, None
    if section.flavor not in spec.flavors:
        known = ", ".join(spec.flavors)
        findings.error(
            "model.flavor",
            f"a flavor of {section.name}: {known}",
            nearest(section.flavor, spec.flavors),
            involves=("model.name",),
        )
        return None, None
    try:
        args = resolve_args(spec, section.flavor, section.args)
    except ValueError as error:
        for line in str(error).splitlines():
            findings.error("model.args", f"sizes that {section.name} can have: {line}", involves=MODEL_KEYS)
        return None, None
    return spec, args


def check_exempt(findings: Findings, spec: ModelSpec, args: Any) -> None:
    """Each pattern of optimizer.no_weight_decay matches a parameter, or what it was to spare would decay in silence."""
    tied = dict(spec.tied(args))
    rows = [row if isinstance(row, tuple) else (row.ours,) for row in spec.hf_names(args)]
    stems = [stem for ours, *_ in rows for stem in ([ours] if isinstance(ours, str) else ours) if stem not in tied]
    if not findings.config.optimizer.weight_decay:
        return
    layers = range(spec.constraints(args)["n_layers"])
    names = [name for stem in stems for name in dict.fromkeys(stem.replace("{}", str(layer)) for layer in layers)]
    for pattern in findings.config.optimizer.no_weight_decay:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(stem.replace("{}", "0") for stem in stems)
            findings.error(
                "optimizer.no_weight_decay",
                f'patterns that match a parameter; "{pattern}" matches none of {shown}, ...',
                nearest(pattern, names),
                involves=MODEL_KEYS,
            )
