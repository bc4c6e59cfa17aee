"""What all sections share: strictness, value kinds, and rules that look at several keys of one section."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from typing_extensions import Self


class Conflict(NamedTuple):
    """Two or more keys of one section that do not fit together. Key names are relative to the section."""

    key: str
    expected: str
    remedy: str
    involves: tuple[str, ...] = ()


class Section(BaseModel):
    """One TOML table. Unknown keys, other types and values out of range are refused; nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def conflicts(self) -> list[Conflict]:
        """Rules over several keys of this section; checked once each key is right by itself."""
        return []

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        found = self.conflicts()
        if found:
            text = "; ".join(f"{conflict.key}: {conflict.expected}" for conflict in found)
            raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": found})
        return self


def _minus_one_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("expected -1 or an integer > 0")
    return value


def _not_one(value: int) -> int:
    if value == 1:
        raise ValueError("expected 0 or an integer >= 2")
    return value


MOST_MINUTES = 100_000_000  # 190 years: the end of a run is a date, and dates end


def _minutes_or_auto(value: object) -> float | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_MINUTES:
        raise ValueError("expected minutes or auto")
    return float(value)


# A path: with the home folder for `~`, from here on wherever it is used, compared, written or told.
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
MinusOneOrPositive = Annotated[
    int, AfterValidator(_minus_one_or_positive), Field(json_schema_extra={"expected": "-1 or an integer > 0"})
]
KeepCount = Annotated[
    int, Field(ge=0, json_schema_extra={"expected": "0 or an integer >= 2"}), AfterValidator(_not_one)
]
BatchRamp = Annotated[list[int], Field(json_schema_extra={"expected": "a list [start, increment, samples]"})]
Steps = Annotated[list[int], Field(json_schema_extra={"expected": "a list of steps"})]
StepRanges = Annotated[
    list[list[int]], Field(json_schema_extra={"expected": "a list of pairs of steps, [[first, last], ...]"})
]
StepWeights = Annotated[
    list[list[int | float]], Field(json_schema_extra={"expected": "a list of pairs, [[step, weight], ...]"})
]
Minutes = Annotated[
    float | Literal["auto"],
    PlainValidator(_minutes_or_auto),  # a union's own would report a wrong value twice
    Field(json_schema_extra={"expected": f'a number of minutes >= 0 and <= {MOST_MINUTES}, or "auto"'}),
]
NthOrOp = Annotated[
    str,
    Field(pattern=r"^(op|[1-9][0-9]*)$", json_schema_extra={"expected": '"op" or a positive integer in quotes ("2")'}),
]
