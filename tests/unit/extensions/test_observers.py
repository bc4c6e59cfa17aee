"""Observers receive rows, and their errors do not end the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.extensions.user_code import ExtensionError, Observers


class Recording:
    """Records its calls, and fails at the step `failing`."""

    failing = -1

    def __init__(self, run_folder: Path, settings: Mapping[str, Any]) -> None:
        self.calls: list[Any] = settings["calls"]

    def on_step(self, row: Mapping[str, Any]) -> None:
        if row["step"] == self.failing:
            raise RuntimeError("no disk")
        self.calls.append((type(self).__name__, row["step"]))

    def on_validation(self, row: Mapping[str, Any]) -> None:
        self.calls.append((type(self).__name__, "validation", row["step"]))

    def close(self) -> None:
        self.calls.append((type(self).__name__, "close"))


class Failing(Recording):
    failing = 2


def test_a_failing_observer_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    observers = Observers()
    observers.build([f"{__name__}:Failing", f"{__name__}:Recording"], tmp_path, {"calls": calls})
    with caplog.at_level(logging.ERROR):
        observers.on_steps([{"step": 1}, {"step": 2}])
        observers.on_validation({"step": 2})
        observers.close()
    assert calls == [
        ("Failing", 1), ("Recording", 1), ("Recording", 2), ("Recording", "validation", 2),
        ("Recording", "close"),
    ]  # fmt: skip
    (message,) = caplog.messages
    assert (
        f"The observer {__name__}:Failing failed and receives no more rows: RuntimeError" in message
    )


def no_observer(run_folder: Path, settings: Mapping[str, Any]) -> None:
    """Return no object with methods."""


def test_an_observer_without_methods_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="has no on_step, on_validation, close. Expected"):
        Observers().build([f"{__name__}:no_observer"], tmp_path, {})


def test_an_observer_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="cannot be built: KeyError: 'calls', at line"):
        Observers().build([f"{__name__}:Recording"], tmp_path, {})
