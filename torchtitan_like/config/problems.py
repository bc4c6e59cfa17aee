"""Problems of a configuration, and the type of the rules that find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torchtitan_like.util.credentials import mask_text
from torchtitan_like.util.exit_codes import ExitCode, RunFailure

# "training_error": an error before training, and a warning in a check on any machine.
Severity = Literal["error", "warning", "training_error"]
MAX_LINES = 200  # of a report
NO_EFFECT = "has no effect in this run"


@dataclass(frozen=True)
class Problem:
    """Something wrong with a configuration, or worth a warning.

    key: dotted ("training.steps"); empty if no single setting is wrong.
    value: None is not shown.
    expected: follows the word "expected" in an error. In a warning it states what happens instead.
    remedy: what to do. In an error, "" means to correct the setting.
    origin: where the value was written ("debug.toml", "command line", "default").
    involves: the other settings that the rule reads.
    rule: the rule's name, if it has one.
    """

    key: str
    value: object
    expected: str
    remedy: str = ""
    origin: str = ""
    severity: Severity = "error"
    involves: tuple[str, ...] = ()
    rule: str = ""

    @property
    def has_no_effect(self) -> bool:
        """True for the warning about a setting without effect."""
        return self.severity == "warning" and self.expected.startswith(NO_EFFECT)

    def __str__(self) -> str:
        origin = f"{self.origin}: " if self.origin else ""
        setting = ""
        if self.key:
            setting = self.key if self.value is None else f"{self.key} = {show(self.value)}"
            setting += ": "
        expected, remedy = self.expected, self.remedy
        if self.severity != "warning":
            expected = f"expected {expected}"
            remedy = remedy or "correct it"
        return f"{origin}{setting}{expected}" + (f" -> {remedy}" if remedy else "")


def no_effect_warning(key: str, reason: str, *involves: str) -> Problem:
    """Return the warning that a setting has no effect in this run. involves: see `Problem`."""
    return Problem(key, None, f"{NO_EFFECT}: {reason}", severity="warning", involves=involves)


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


class ConfigError(RunFailure):
    """Every problem of one configuration.

    partial: the `JobConfig` with the default of each faulty value, or None. Later checks use it
    to report their problems at the same time. faulty: the dotted keys of the faulty values.
    """

    exit_code = ExitCode.BAD_CONFIG

    def __init__(
        self,
        problems: Iterable[Problem],
        *,
        partial: Any = None,
        faulty: frozenset[str] = frozenset(),
    ) -> None:
        self.problems = list(problems)
        self.partial = partial
        self.faulty = faulty
        super().__init__(self.problems)

    def __str__(self) -> str:
        return report(self.problems)


def report(problems: Iterable[Problem]) -> str:
    """Return all problems as text without credentials: errors, then warnings, one line each."""
    problems = list(problems)
    errors = [problem for problem in problems if problem.severity != "warning"]
    warnings = [problem for problem in problems if problem.severity == "warning"]
    lines = []
    if errors:
        lines.append(f"{len(errors)} problem{'s' * (len(errors) > 1)} in the configuration:")
        lines += [f"  {number}. {problem}" for number, problem in enumerate(errors[:MAX_LINES], 1)]
        if len(errors) > MAX_LINES:
            lines.append(f"  ... and {len(errors) - MAX_LINES:,} more")
    lines += [f"warning: {problem}" for problem in warnings]
    return mask_text("\n".join(lines))


def merge_no_effect(problems: Iterable[Problem]) -> list[Problem]:
    """Merge two or more warnings about settings without effect into one."""
    problems = list(problems)
    idle = [problem for problem in problems if problem.has_no_effect]
    if len(idle) < 2:
        return problems
    settings = "; ".join(f"{problem.key}{_describe_idle(problem)}" for problem in idle)
    text = f"{len(idle)} settings have no effect in this run: {settings}"
    others = [problem for problem in problems if not problem.has_no_effect]
    return [*others, Problem("", None, text, severity="warning")]


def _describe_idle(problem: Problem) -> str:
    """Return the value of a setting without effect, its origin and the reason."""
    value = "" if problem.value is None else f" = {show(problem.value)}"
    reason = problem.expected.removeprefix(f"{NO_EFFECT}: ")
    return f"{value} ({', '.join(filter(None, (problem.origin, reason)))})"


def show(value: object) -> str:
    """Return a value as TOML writes it, shortened to 120 characters."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, list):
        text = "[" + ", ".join(map(show, value)) + "]"
    else:
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
