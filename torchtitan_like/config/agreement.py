"""Check that all ranks have read the same settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torchtitan_like.config.fields import find
from torchtitan_like.config.layers import leaves
from torchtitan_like.config.problems import ConfigError, Problem, show
from torchtitan_like.config.schema import JobConfig


def check_agreement(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the settings of all ranks. Each has read its own files and arguments. A collective.

    gather: returns the values of all ranks, in the order of ranks.
    Raises ConfigError on all ranks if two of them have different settings.
    """
    settings = shared_settings(config)
    text = json.dumps(settings, default=str, sort_keys=True)
    # Thousands of ranks would send megabytes of settings, so they compare digests first.
    if len(set(gather(hashlib.sha256(text.encode()).digest()))) == 1:
        return
    first, *others = gather(settings)
    problems: dict[str, Problem] = {}
    for rank, other in enumerate(others, start=1):
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                expected = f"the same on every rank; rank {rank} has {show(other.get(key))}"
                remedy = "start all nodes with one config file and the same arguments"
                problem = Problem(key, first.get(key), expected, remedy, "rank 0")
                problems.setdefault(key, problem)
    if problems:  # none if the digests differ by 1 and 1.0
        raise ConfigError(problems.values())


def shared_settings(config: JobConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, by dotted key.

    The order of the sources is one of them: mixtures depend on it.
    """
    shared = {}
    for path, value in leaves(config.model_dump()):
        setting = find(path)
        if value != {} and not (setting is not None and setting.ranks_may_differ):
            shared[".".join(path)] = value
    for name in ("data", "validation"):
        shared[f"{name}.sources"] = list(getattr(config, name).sources)
    return shared
