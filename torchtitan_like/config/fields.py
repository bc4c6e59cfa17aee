"""Reading the schema: which key is of which kind, in words and as Python types."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from torchtitan_like.config.base import Section
from torchtitan_like.config.schema import JobConfig

Path = tuple[str, ...]


class Setting:
    """One key of the schema as seen from outside: its type, default, description.

    A table of tables by name (``data.sources``) is a Setting too; ``below`` leads to the keys of one of its tables.
    """

    def __init__(self, path: Path, field: FieldInfo) -> None:
        self.path = path
        self.field = field
        self.kind, self.optional = _strip_optional(field.annotation)

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def is_free(self) -> bool:
        """True for a table whose keys the schema does not know (``model.args``)."""
        return get_origin(self.kind) is dict and self.section is None

    @property
    def section(self) -> type[Section] | None:
        """The section class if this is a table, or the class of each table if it is a table of tables."""
        candidate = get_args(self.kind)[1] if get_origin(self.kind) is dict else self.kind
        return candidate if isinstance(candidate, type) and issubclass(candidate, Section) else None

    @property
    def is_named_tables(self) -> bool:
        return get_origin(self.kind) is dict and self.section is not None

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words of a choice, or of the items of a list of choices."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def expected(self) -> str:
        """What a right value looks like, e.g. ``an integer > 0``."""
        extra = self.field.json_schema_extra
        text = str(extra["expected"]) if isinstance(extra, dict) and "expected" in extra else _describe(self.kind)
        text += _limits(self.field.metadata) if not isinstance(extra, dict) else ""
        return f"{text}, or None" if self.optional else text

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def is_required(self) -> bool:
        return self.field.is_required()


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    """The type without Annotated and without ``| None``, and whether None is allowed."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _strip_optional(members[0])[0], len(members) < len(get_args(annotation))
    return annotation, False


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        words = [f'"{word}"' for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        if get_origin(item) is Literal:
            return "a list of: " + ", ".join(f'"{word}"' for word in get_args(item))
        return "a list of lists of strings" if get_origin(item) is list else "a list of strings"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Section)):
        return "a table of settings"
    return _WORDS.get(kind, "a value")


def _limits(metadata: list[Any]) -> str:
    parts = []
    for limit in metadata:
        if isinstance(limit, annotated_types.Gt):
            parts.append(f"> {limit.gt}")
        elif isinstance(limit, annotated_types.Ge):
            parts.append(f">= {limit.ge}")
        elif isinstance(limit, annotated_types.Lt):
            parts.append(f"< {limit.lt}")
        elif isinstance(limit, annotated_types.Le):
            parts.append(f"<= {limit.le}")
        elif isinstance(limit, annotated_types.MinLen):
            parts.append("that is not empty")
    return " " + " and ".join(parts) if parts else ""


def settings_of(section: type[Section], prefix: Path = ()) -> Iterator[Setting]:
    """The keys of one section, in order, sub-tables not opened."""
    for name, field in section.model_fields.items():
        yield Setting((*prefix, name), field)


def all_settings(section: type[Section] = JobConfig, prefix: Path = ()) -> Iterator[Setting]:
    """Every key of the schema, sub-tables opened. Tables by name appear as themselves and, opened, under ``<name>``."""
    for setting in settings_of(section, prefix):
        if setting.section is None:
            yield setting
        elif setting.is_named_tables:
            yield setting
            yield from all_settings(setting.section, (*setting.path, "<name>"))
        else:
            yield from all_settings(setting.section, setting.path)


def find(path: Path) -> Setting | None:
    """The Setting that describes ``path``, or None. Keys inside a free table are described by the table."""
    section: type[Section] = JobConfig
    setting = None
    rest = list(path)
    while rest:
        field = section.model_fields.get(rest.pop(0))
        if field is None:
            return None
        setting = Setting(path[: len(path) - len(rest)], field)
        if setting.is_free or not rest:
            return setting
        if setting.section is None:
            return None
        section = setting.section
        if setting.is_named_tables:
            rest.pop(0)
    return setting


def names_at(path: Path) -> list[str]:
    """The names that may follow ``path``; empty where the schema has no table or the names are free."""
    if not path:
        return list(JobConfig.model_fields)
    setting = find(path)
    if setting is None or setting.section is None:
        return []
    return [] if setting.is_named_tables and setting.path == path else list(setting.section.model_fields)
