"""Read a model's table of Hugging Face names in either direction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")
Table = tuple[tuple[str, str], ...]


def to_hf(table: Table, state: Mapping[str, V], tied: Table = ()) -> dict[str, V]:
    """`state` (our names) under Hugging Face's names, without the second name of a tied parameter. Raises KeyError."""
    aliases = {alias for alias, _ in tied}
    return _rename(table, {name: value for name, value in state.items() if name not in aliases})


def from_hf(table: Table, state: Mapping[str, V], tied: Table = ()) -> dict[str, V]:
    """`state` (Hugging Face's names) under ours; a tied parameter gets both its names. Raises KeyError."""
    ours = _rename(tuple((theirs, mine) for mine, theirs in table), state)
    return ours | {alias: ours[source] for alias, source in tied}


def _rename(rows: Table, state: Mapping[str, V]) -> dict[str, V]:
    patterns = [(re.compile(re.escape(old).replace(r"\{\}", r"(\d+)")), new) for old, new in rows]
    renamed = {_new_name(patterns, name): value for name, value in state.items()}
    unknown = [name for name in state if _new_name(patterns, name) is None]
    if unknown:
        raise KeyError(f"no Hugging Face name is known for {len(unknown)} of {len(state)} tensors: {unknown[:5]}")
    return renamed  # type: ignore[return-value]


def _new_name(patterns: list[tuple[re.Pattern[str], str]], name: str) -> str | None:
    for pattern, new in patterns:
        if match := pattern.fullmatch(name):
            return new.format(*match.groups())
    return None
