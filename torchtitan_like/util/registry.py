"""The names that user code registers: one table for each kind of extension.

User code calls `extensions.register`, which checks a registration. The packages of the trainer look
up names here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal[
    "optimizer",
    "lr_schedule",
    "loss",
    "converter",
    "data_source",
    "sample_processor",
    "observer",
    "section",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Registered:
    """A registered function or class. origin: file and line of its registration."""

    item: Any
    origin: str


_tables: dict[Kind, dict[str, Registered]] = {kind: {} for kind in KINDS}


def add(kind: Kind, name: str, item: Any, origin: str) -> None:
    """Register `item`. The same line of a file may register a name again.

    Raises ValueError if another line has registered the name.
    """
    table = _tables[kind]
    if name in table and table[name].origin != origin:
        raise ValueError(
            f"two registrations of the {label(kind)} {name!r}: {table[name].origin} and {origin}. "
            "Expected one: give the second another name"
        )
    table[name] = Registered(item, origin)


def names(kind: Kind) -> tuple[str, ...]:
    """Return the registered names of a kind, in order of registration."""
    return tuple(_tables[kind])


def is_registered(kind: Kind, name: str) -> bool:
    """Return True if user code has registered the name."""
    return name in _tables[kind]


def find(kind: Kind, name: str) -> Any:
    """Return the registered function or class. Raises KeyError for an unknown name."""
    return _tables[kind][name].item


def origin_of(kind: Kind, name: str) -> str:
    """Return the file and line that registered the name. Raises KeyError for an unknown name."""
    return _tables[kind][name].origin


def label(kind: Kind) -> str:
    """Return the kind as words, for messages."""
    return {"lr_schedule": "learning-rate schedule", "section": "config section"}.get(
        kind, kind.replace("_", " ")
    )
