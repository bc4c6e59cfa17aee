"""What all ranks of a run have to have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torchtitan_like.config.layers import leaves
from torchtitan_like.config.problems import ConfigError, Problem, show
from torchtitan_like.config.schema import JobConfig

# Where things lie may differ from node to node; so may what a run is called.
_PLACES = ("path", "folder", "file", "csv", "description")


def check_agreement(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """A collective. Raises ConfigError, on all ranks, where two of them have other settings: each has read its own file."""
    ours = _shared(config)
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


def _shared(config: JobConfig) -> dict[str, Any]:
    """Every setting that is no place, by its dotted key; of the texts also their order, in which they are read."""
    found = [(path, value) for path, value in leaves(config.model_dump()) if value != {}]
    shared = {".".join(path): value for path, value in found if not path[-1].endswith(_PLACES)}
    return shared | {f"{name}.sources": list(getattr(config, name).sources) for name in ("data", "validation")}
