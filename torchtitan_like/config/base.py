"""How a section declares its settings: base class, fields, the facts of a setting, types of values.

A field of a section class is a setting:

    gc_debug: bool = field(
        False,
        "Collect garbage at every step and report cycles that hold tensors.",
        affects="nothing",
        needs=above(0, "gc_freq"),
    )

`Section.facts` declares facts of all settings of a section. A test fails if a setting does not
declare what it affects. After a change, write docs/reference/config.md again: see document.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from torchtitan_like.config.problems import Rule, broken_rules
from torchtitan_like.util.modules import is_dotted

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from typing_extensions import Self


# The state of a run that a setting affects. A resumed run may not change the setting, unless
# `checkpoint.exclude_from_loading` names the state or `checkpoint.allow_change` the setting.
# "nothing": does not affect the result, or another check covers it (datasets have a fingerprint).
# "future_samples": only samples that the run has not read. It may change, and the run logs it.
Affected = Literal[
    "nothing",
    "future_samples",
    "model",
    "optimizer",
    "ema",
    "lr_scheduler",
    "dataloader",
    "train_state",
    "numerics",
]


@dataclass(frozen=True)
class Need:
    """A condition on another setting, without which the setting that has the need has no effect.

    key: the other setting, dotted. A name without a dot is in the same section.
    condition: such as "{key} > 0". `{key}` is replaced by the key of the other setting.
    is_met: takes the value of the other setting, and the whole configuration.
    reason: why the setting has no effect otherwise; "" if the condition explains itself.
    """

    key: str
    condition: str
    is_met: Callable[[Any, Any], bool]
    reason: str = ""

    def in_section(self, section: str) -> Need:
        """Return the need with the dotted key, for a setting in `section`."""
        key = self.key if "." in self.key else f"{section}.{self.key}"
        return replace(self, key=key, condition=self.condition.replace("{key}", key))

    def __str__(self) -> str:
        return f"{self.condition}: {self.reason}" if self.reason else self.condition


def enabled(key: str = "enable") -> Need:
    """Return the need for a switch to be true."""
    return Need(key, "{key} = true", lambda value, _: bool(value))


def above(limit: int, key: str, reason: str = "") -> Need:
    """Return the need for a number to be larger than `limit`."""
    return Need(key, f"{{key}} > {limit}", lambda value, _: bool(value > limit), reason)


def one_of(key: str, *choices: str, reason: str = "") -> Need:
    """Return the need for a setting to have one of these values."""
    condition = "{key} = " + " or ".join(f'"{choice}"' for choice in choices)
    return Need(key, condition, lambda value, _: value in choices, reason)


def converter(name: str) -> Need:
    """Return the need for a converter of the model."""
    key = "model.converters"
    return Need(key, f'{{key}} = ["{name}"]', lambda converters, _: name in converters)


@dataclass(frozen=True)
class Facts:
    """Facts about one setting, or about all settings of a section.

    affects: None for a setting if its section declares it.
    needs: a setting also has the needs of its section.
    ranks_may_differ: ranks may have different values. Always true for paths (`HomePath`).
    """

    affects: Affected | None = None
    needs: tuple[Need, ...] = ()
    ranks_may_differ: bool = False


def field(
    default: Any = ...,
    description: str = "",
    *,
    affects: Affected | None = None,
    needs: Need | tuple[Need, ...] = (),
    ranks_may_differ: bool = False,
    **limits: Any,
) -> Any:
    """Declare a setting. Without a default it is required.

    affects, needs, ranks_may_differ: see `Facts`.
    limits: gt, ge, lt, le, min_length of `pydantic.Field`.
    """
    facts = Facts(affects, needs if isinstance(needs, tuple) else (needs,), ranks_may_differ)
    extra: dict[str, Any] = {"facts": facts}
    return Field(default, description=description, json_schema_extra=extra, **limits)


@dataclass(frozen=True)
class Expected:
    """Metadata of a type: its valid values, and a description of them for errors and documents."""

    description: str
    is_valid: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if not self.is_valid(value):
            raise ValueError(f"expected {self.description}")
        return value


@dataclass(frozen=True)
class NameOf:
    """Metadata of a string: one of these names, or "module:name" in user code.

    kind: see `extensions.user_code.PARAMETERS`.
    """

    kind: str
    built_in: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        listed = "".join(f'"{name}", ' for name in self.built_in)
        own = f'your own {self.kind} as "module:name"'
        return f"{listed}or {own}" if listed else own

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name not in self.built_in and not is_dotted(name):
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


def _are_step_ranges(ranges: list[list[int]]) -> bool:
    are_pairs = all(len(pair) == 2 and 1 <= pair[0] <= pair[1] for pair in ranges)
    return are_pairs and sorted(ranges, key=lambda pair: pair[0]) == ranges


def _are_step_weights(pairs: list[list[int | float]]) -> bool:
    are_pairs = all(len(pair) == 2 and isinstance(pair[0], int) and pair[1] >= 0 for pair in pairs)
    steps = [1, *(pair[0] for pair in pairs)] if are_pairs else []
    return are_pairs and steps == sorted(set(steps))


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
    int, Expected("-1 or an integer > 0", lambda value: value == -1 or value > 0)
]
KeepCount = Annotated[int, Expected("0 or an integer >= 2", lambda value: value == 0 or value >= 2)]
BatchRamp = Annotated[list[int], Expected("a list [start, increment, samples]")]
Steps = Annotated[
    list[int], Expected("a list of steps >= 1", lambda steps: min(steps, default=1) >= 1)
]
StepRanges = Annotated[
    list[list[int]],
    Expected(
        "a list of pairs of steps, [[first, last], ...], 1 <= first <= last, in order",
        _are_step_ranges,
    ),
]
StepWeights = Annotated[
    list[list[int | float]],
    Expected(
        "a list of pairs, [[step, weight], ...], step >= 2, weight >= 0, in order of the steps",
        _are_step_weights,
    ),
]
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
