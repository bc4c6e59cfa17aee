"""What is wrong with a configuration, told in a way a reader can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtitan_like.util.credentials import mask_text

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig


# "training_error": an error when about to train, a warning in a check, which may run on another machine.
Severity = Literal["error", "warning", "training_error"]
NOT_AVAILABLE_YET = "not available yet"
MOST_LINES = 200  # of a report
NO_EFFECT = "has no effect in this run"


@dataclass(frozen=True)
class Problem:
    """One finding.

    ``key`` is dotted ("training.steps"), empty when no single setting is to blame; ``value`` None is not shown.
    ``expected`` says what would have been right (it is read after "expected"; for a warning: what happens instead),
    ``remedy`` what to do, ``origin`` where the value was written ("debug.toml", "command line", "default").
    ``involves`` names the other settings a rule looked at, ``rule`` that rule where it has a name.
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
        """True if this warns about a setting that changes nothing."""
        return self.severity == "warning" and self.expected.startswith(NO_EFFECT)

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        what = ""
        if self.key:
            what = self.key if self.value is None else f"{self.key} = {show(self.value)}"
            what += ": "
        remedy = f" -> {self.remedy}" if self.remedy else ""
        is_expectation = self.severity == "error" and self.expected != NOT_AVAILABLE_YET
        expected = f"expected {self.expected}" if is_expectation else self.expected
        return f"{where}{what}{expected}{remedy}"


class ConfigError(Exception):
    """Every problem found in one configuration.

    ``partial`` is the configuration with each faulty value replaced by its default (None when there is none): later
    checks use it to report their findings in the same round. ``faulty`` holds the dotted keys so replaced.
    """

    def __init__(
        self, problems: Iterable[Problem], *, partial: JobConfig | None = None, faulty: frozenset[str] = frozenset()
    ) -> None:
        self.problems = list(problems)
        self.partial = partial
        self.faulty = faulty
        super().__init__(self.problems)

    def __str__(self) -> str:
        return report(self.problems)


def report(problems: Iterable[Problem]) -> str:
    """All problems as text without credentials, one per line, errors first, with a count on top."""
    problems = list(problems)
    errors = [problem for problem in problems if problem.severity == "error"]
    warnings = [problem for problem in problems if problem.severity == "warning"]
    lines = []
    if errors:
        lines.append(f"{len(errors)} problem{'s' * (len(errors) > 1)} in the configuration:")
        lines += [f"  {number}. {problem}" for number, problem in enumerate(errors[:MOST_LINES], 1)]
        if len(errors) > MOST_LINES:
            lines.append(f"  ... and {len(errors) - MOST_LINES:,} more")
    lines += [f"warning: {problem}" for problem in warnings]
    return mask_text("\n".join(lines))


def merge_no_effect(problems: Iterable[Problem]) -> list[Problem]:
    """Replace the warnings about settings without effect by one that lists them all."""
    problems = list(problems)
    idle = [problem for problem in problems if problem.has_no_effect]
    if len(idle) < 2:
        return problems
    listed = [f"{one.key}{_reason(one)}" for one in idle]
    text = f"{len(idle)} settings have no effect in this run: {'; '.join(listed)}"
    rest = [problem for problem in problems if not problem.has_no_effect]
    return [*rest, Problem("", None, text, severity="warning")]


def _reason(problem: Problem) -> str:
    """The value of a setting without effect, then where it was written and why it has none."""
    value = "" if problem.value is None else f" = {show(problem.value)}"
    why = problem.expected.removeprefix(NO_EFFECT).lstrip(":; ")
    return f"{value} ({', '.join(filter(None, (problem.origin, why)))})"


def show(value: object) -> str:
    """A value as a TOML reader would write it; long ones are cut."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, list):
        text = "[" + ", ".join(map(show, value)) + "]"
    else:
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def nearest(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """The remedy for a misspelt name: ``did you mean "steps"?``, or an empty string when nothing is near.

    ``prefix`` is put before the name that is shown.
    """
    names = {name.lower(): name for name in candidates}
    found = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.65)
    return f'did you mean "{prefix}{names[found[0]]}"?' if found else ""
