"""What is wrong with a configuration, told in a way a reader can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig


NOT_AVAILABLE_YET = "not available yet"


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
    severity: Literal["error", "warning"] = "error"
    involves: tuple[str, ...] = ()
    rule: str = ""

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
    """All problems as text, one per line, errors first, with a count on top."""
    problems = list(problems)
    errors = [problem for problem in problems if problem.severity == "error"]
    warnings = [problem for problem in problems if problem.severity == "warning"]
    lines = []
    if errors:
        lines.append(f"{len(errors)} problem{'s' * (len(errors) > 1)} in the configuration:")
        lines += [f"  {number}. {problem}" for number, problem in enumerate(errors, 1)]
    lines += [f"warning: {problem}" for problem in warnings]
    return "\n".join(lines)


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
