"""Collecting what is wrong with a valid configuration: each finding gets its setting's value and origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchtitan_like.config.availability import value_of
from torchtitan_like.config.problems import Problem

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig


class Findings:
    """Problems in the order in which they are found. ``training``: missing files are errors, else warnings."""

    def __init__(self, config: JobConfig, *, training: bool) -> None:
        self.config, self.training = config, training
        self.problems: list[Problem] = []

    def error(self, key: str, expected: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        self.add(key, expected, remedy, "error", involves)

    def warning(self, key: str, text: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        self.add(key, text, remedy, "warning", involves)

    def missing_file(self, key: str, expected: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        """An error when about to train; a warning in a check, which may run on another machine."""
        text = expected if self.training else f"expected {expected}"
        self.add(key, text, remedy, "error" if self.training else "warning", involves)

    def add(
        self,
        key: str,
        expected: str,
        remedy: str,
        severity: Literal["error", "warning"],
        involves: tuple[str, ...],
        rule: str = "",
    ) -> None:
        """Note a problem with ``key``, or with what it and ``involves`` are together."""
        value = value_of(self.config, key) if "." in key and key != "model.args" else None
        written = [name for name in (key, *involves) if self.config.is_set(name)]
        origin = self.config.origin_of(written[0] if written else key)
        self.problems.append(Problem(key, value, expected, remedy, origin, severity, involves, rule))
