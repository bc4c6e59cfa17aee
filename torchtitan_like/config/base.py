"""The base class of all sections, and the types of their values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from torchtitan_like.config.facts import Facts
from torchtitan_like.config.problems import Rule, broken_rules
from torchtitan_like.util import registry
from torchtitan_like.util.registry import Kind

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from typing_extensions import Self


@dataclass(frozen=True)
class Expected:
    """Metadata of a type: a description of its valid values, for errors and documents."""

    description: str


@dataclass(frozen=True)
class NameOf:
    """Metadata of a string: one of these names, or a name of this kind that user code registers."""

    kind: Kind
    built_in: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.built_in, *registry.names(self.kind))

    @property
    def description(self) -> str:
        listed = ", ".join(f'"{name}"' for name in self.choices)
        registered = f"a registered {registry.label(self.kind)} (experimental.custom_import)"
        return f"{listed}, or {registered}" if listed else registered

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name not in self.choices:
            raise ValueError(f"expected {self.description}")
        return name


class Section(BaseModel):
    """One TOML table. Unknown keys, wrong types and values out of range are errors.

    No value is converted to another type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # Facts about all settings of this section and of the sections in it.
    facts: ClassVar[Facts] = Facts()
    # Rules over several keys of this section, checked after each key is valid by itself.
    rules: ClassVar[tuple[Rule[Any], ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        problems = [rule.problem(self) for rule in broken_rules(self.rules, self)]
        if problems:
            text = "; ".join(f"{problem.key}: {problem.expected}" for problem in problems)
            context = {"text": text, "problems": problems}
            raise PydanticCustomError("broken_rules", "{text}", context)
        return self


def _minus_one_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("expected -1 or an integer > 0")
    return value


def _not_one(value: int) -> int:
    if value == 1:
        raise ValueError("expected 0 or an integer >= 2")
    return value


MOST_MINUTES = 100_000_000  # 190 years: the end of a run must be a valid date


def _minutes_or_auto(value: object) -> float | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected minutes or auto")
    if not 0 <= value <= MOST_MINUTES:
        raise ValueError("expected minutes or auto")
    return float(value)


# A path. `~` becomes the home folder when the configuration is loaded. Ranks may have other paths.
EXPAND_HOME = AfterValidator(os.path.expanduser)
HomePath = Annotated[str, EXPAND_HOME]
MinusOneOrPositive = Annotated[
    int, AfterValidator(_minus_one_or_positive), Expected("-1 or an integer > 0")
]
KeepCount = Annotated[int, Field(ge=0), AfterValidator(_not_one), Expected("0 or an integer >= 2")]
BatchRamp = Annotated[list[int], Expected("a list [start, increment, samples]")]
Steps = Annotated[list[int], Expected("a list of steps")]
StepRanges = Annotated[list[list[int]], Expected("a list of pairs of steps, [[first, last], ...]")]
StepWeights = Annotated[list[list[int | float]], Expected("a list of pairs, [[step, weight], ...]")]
Minutes = Annotated[
    float | Literal["auto"],
    PlainValidator(_minutes_or_auto),  # a union's own validator reports a wrong value twice
    Expected(f'a number of minutes >= 0 and <= {MOST_MINUTES}, or "auto"'),
]
NthOrOp = Annotated[
    str,
    Field(pattern=r"^(op|[1-9][0-9]*)$"),
    Expected('"op" or a positive integer in quotes ("2")'),
]
