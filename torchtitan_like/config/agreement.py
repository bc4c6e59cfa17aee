"""What all ranks of a run have to have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torchtitan_like.config.base import Section
from torchtitan_like.config.problems import ConfigError, Problem, show
from torchtitan_like.config.schema import JobConfig

# Where things lie may differ from node to node; so may what a run is called.
_PLACES = ("path", "folder", "file", "csv", "description")


def check_agreement(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """A collective. Raises ConfigError, on all ranks, where two of them have other settings: each has read its own file."""
    ours = dict(_shared(config))
    digest = hashlib.sha256(json.dumps(ours, default=str, sort_keys=True).encode()).digest()
    if len(set(gather(digest))) == 1:  # of thousands of ranks the texts would be megabytes
        return
    first, *others = gather(ours)
    problems: dict[str, Problem] = {}
    for rank, theirs in enumerate(others, start=1):
        for key in {**first, **theirs}:
            if first.get(key) != theirs.get(key):
                expected = f"the same on every rank; rank {rank} has {show(theirs.get(key))}"
                remedy = "start all nodes with one config file and the same arguments"
                problems.setdefault(key, Problem(key, first.get(key), expected, remedy, "rank 0"))
    if problems:  # none: 1 and 1.0
        raise ConfigError(problems.values())


def _shared(section: Section | dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Every setting that is no place, by its dotted key. Of tables by name also their order, in which texts are read."""
    found: list[tuple[str, Any]] = []
    for name, value in section.items() if isinstance(section, dict) else section:
        if isinstance(value, Section | dict):
            found += _shared(value, f"{path}{name}.")
            if name == "sources":
                found.append((f"{path}{name}", list(value)))
        elif not name.endswith(_PLACES):
            found.append((f"{path}{name}", value))
    return found
