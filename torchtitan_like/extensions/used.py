"""The extensions that a configuration uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchtitan_like.config.fields import find
from torchtitan_like.config.layers import leaves
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.util import registry
from torchtitan_like.util.registry import Kind


class Use(NamedTuple):
    """A setting that contains a registered name. key: dotted."""

    kind: Kind
    name: str
    key: str


def uses(config: JobConfig) -> Iterator[Use]:
    """Yield each registered name in a setting."""
    for path, value in leaves(config.model_dump()):
        setting = find(path)
        if setting is None or (name_of := setting.name_of) is None:
            continue
        for name in value if isinstance(value, list) else [value]:
            if registry.is_registered(name_of.kind, name):
                yield Use(name_of.kind, name, ".".join(path))


def used_extensions(config: JobConfig) -> dict[Kind, list[str]]:
    """Return the registered names of settings and sections by kind, for checkpoints."""
    used: dict[Kind, set[str]] = {"section": set(config.extra_sections)}
    for use in uses(config):
        used.setdefault(use.kind, set()).add(use.name)
    return {kind: sorted(names) for kind, names in used.items() if names}
