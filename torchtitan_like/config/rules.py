"""The type of all rules: when a setting is wrong, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchtitan_like.config.problems import Problem, Severity

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """A setting is wrong, or deserves a warning, if `when` returns True.

    Subject: what `when`, `expected` and `remedy` read. For `Section.rules` it is the section, and
    keys are relative to it. For the rules of check it is a `RunContext`, and keys are dotted.
    Rules never refuse a setting of a disabled feature.

    name: stable and unique, for tests and docs.
    key: the setting to report.
    expected: follows the word "expected" in an error. In a warning it states what happens instead.
    involves: other settings that `when` reads.
    """

    name: str
    key: str
    when: Callable[[Subject], bool]
    expected: str | Callable[[Subject], str]
    remedy: str | Callable[[Subject], str] = ""
    involves: tuple[str, ...] = ()
    severity: Severity = "error"

    def problem(self, subject: Subject) -> Problem:
        """Describe the broken rule, without the setting's value and origin."""
        expected = self.expected if isinstance(self.expected, str) else self.expected(subject)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(subject)
        return Problem(
            self.key,
            None,
            expected,
            remedy,
            severity=self.severity,
            involves=self.involves,
            rule=self.name,
        )


def broken_rules(rules: Iterable[Rule[Subject]], subject: Subject) -> list[Rule[Subject]]:
    """Return the rules that `subject` breaks, in their order."""
    return [rule for rule in rules if rule.when(subject)]
