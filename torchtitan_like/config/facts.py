"""Facts about settings that other parts of the program need, declared with each setting.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig

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
    is_met: Callable[[Any, JobConfig], bool]
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
