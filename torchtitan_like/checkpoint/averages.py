"""The averaged weights in a native step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.errors import CheckpointError

# Key of the state. A step has averaged weights if its manifest has this entry.
EMA_KEY = "ema"
_WEIGHT_PREFIX = "model."
_AVERAGE_PREFIX = f"{EMA_KEY}.average."


def average_entries(stored: Iterable[str]) -> dict[str, str]:
    """Return the entries of averaged weights by the names of the weights' entries.

    stored: names of entries in a native step. Tensors that are not trained have no average.
    """
    return {
        f"{_WEIGHT_PREFIX}{name.removeprefix(_AVERAGE_PREFIX)}": name
        for name in stored
        if name.startswith(_AVERAGE_PREFIX)
    }


def check_average(step: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a native step has averaged weights."""
    if EMA_KEY not in manifest or manifest["kind"] == "hf":
        raise CheckpointError(
            f"{step} has no averaged weights. Expected a step of a run with ema.enable = true: leave "
            "out --ema, or choose such a step"
        )
