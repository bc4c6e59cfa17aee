"""Build the observers of user code, and protect the run from their errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.extensions.names import ExtensionError, resolve_name
from torchtitan_like.extensions.protocols import Observer, Settings
from torchtitan_like.util.modules import describe_line

logger = logging.getLogger()

METHODS = ("on_step", "on_validation", "close")


class Observers:
    """The observers of a run by name. An observer that raises an error is logged and dropped."""

    def __init__(self) -> None:
        self._observers: dict[str, Observer] = {}

    def build(self, names: Sequence[str], run_folder: Path, settings: Settings) -> None:
        """Build the user's observers. Raises ExtensionError."""
        for name in names:
            builder = resolve_name(name, "observer")
            try:
                observer = builder(run_folder, settings)
            except Exception as error:  # user code may raise anything
                raise ExtensionError(
                    f"the observer {name} cannot be built: {type(error).__name__}: {error}"
                    f"{describe_line(error)}. Expected no error: correct it"
                ) from error
            if missing := [method for method in METHODS if not hasattr(observer, method)]:
                raise ExtensionError(
                    f"the observer {name} has no {', '.join(missing)}. Expected on_step, "
                    "on_validation and close: define them"
                )
            self._observers[name] = observer

    def on_steps(self, rows: Sequence[dict[str, Any]]) -> None:
        """Pass on rows of metrics.jsonl."""
        for row in rows:
            self._call("on_step", dict(row))  # the observer may change its copy

    def on_validation(self, row: dict[str, Any]) -> None:
        """Pass on a row of validation.jsonl."""
        self._call("on_validation", dict(row))

    def close(self) -> None:
        """Close all observers."""
        self._call("close")

    def _call(self, method: str, *rows: Mapping[str, Any]) -> None:
        for name, observer in tuple(self._observers.items()):
            try:
                getattr(observer, method)(*rows)
            except Exception as error:  # user code may raise anything
                del self._observers[name]
                logger.error(
                    f"The observer {name} failed and receives no more rows: "
                    f"{type(error).__name__}: {error}{describe_line(error)}"
                )
