"""PyTorch-native LLM pretraining. Start reading at `train.py`.

`open_run` and `Trainer` are imported when they are used: this module needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the names of the Python API when they are used."""
    if name in ("Trainer", "open_run"):
        return getattr(import_module("torchtitan_like.run"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
