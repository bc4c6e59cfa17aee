"""Read the schema: the type, default, description and facts of each setting."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from torchtitan_like.config.base import (
    EXPAND_HOME,
    Affected,
    Expected,
    Facts,
    HomePath,
    NameOf,
    Need,
    Section,
)
from torchtitan_like.config.layers import leaves
from torchtitan_like.config.schema import JobConfig, job_config
from torchtitan_like.util.modules import is_dotted

Path = tuple[str, ...]


class Setting:
    """One key of the schema: its type, default, description and facts.

    A table of named tables (`data.sources`) is a Setting too. Keys of one of its tables have the
    name `<name>` in their path.
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
        """True for a table whose keys are not in the schema (`model.args`)."""
        return get_origin(self.kind) is dict and self.section is None

    @property
    def section(self) -> type[Section] | None:
        """The section class if this is a table, or the class of each table in a table of tables."""
        candidate = get_args(self.kind)[1] if get_origin(self.kind) is dict else self.kind
        is_section = isinstance(candidate, type) and issubclass(candidate, Section)
        return candidate if is_section else None

    @property
    def is_named_tables(self) -> bool:
        return get_origin(self.kind) is dict and self.section is not None

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words of a choice, or of the items of a list of choices."""
        if (name := self.name_of) is not None:
            return name.built_in
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def name_of(self) -> NameOf | None:
        """The kind of name that this setting has, or each item of its list; None for other values."""
        return next(_names_in((self.field.metadata, self.field.annotation)), None)

    @property
    def expected(self) -> str:
        """A description of valid values, such as `an integer > 0`."""
        metadata = self.field.metadata
        described = [item.description for item in metadata if isinstance(item, Expected)]
        if (name := self.name_of) is not None:
            prefix = "one of " if name.built_in else ""
            prefix = "a list of: " if get_origin(self.kind) is list else prefix
            described = [prefix + name.description]
        text = described[0] if described else _describe(self.kind) + _limits(metadata)
        return f"{text}, or None" if self.optional else text

    @property
    def is_described(self) -> bool:
        """True if `expected` describes what the validators of the setting accept."""
        return self.name_of is not None or any(
            isinstance(item, Expected) for item in self.field.metadata
        )

    @property
    def description(self) -> str:
        return self.field.description or ""

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def is_required(self) -> bool:
        return self.field.is_required()

    @property
    def facts(self) -> Facts:
        """The facts that the field itself declares."""
        extra = self.field.json_schema_extra
        facts = extra.get("facts") if isinstance(extra, dict) else None
        return facts if isinstance(facts, Facts) else Facts()

    @property
    def affects(self) -> Affected:
        """The state of a run that the setting affects, by its field or the innermost section.

        Raises LookupError if neither declares it.
        """
        declared = [self.facts, *(section.facts for _, section in reversed(self._sections()))]
        for facts in declared:
            if facts.affects is not None:
                return facts.affects
        raise LookupError(f"{self.key} does not declare what it affects")

    @property
    def needs(self) -> list[Need]:
        """The needs of its sections, outermost first, then its own.

        The switch of a section does not need itself.
        """
        sections = self._sections()
        needs = [need.in_section(key) for key, section in sections for need in section.facts.needs]
        needs += [need.in_section(".".join(self.path[:-1])) for need in self.facts.needs]
        return [need for need in needs if need.key != self.key]

    @property
    def ranks_may_differ(self) -> bool:
        """True if each rank may have a value of its own: paths, and fields that declare it."""
        is_path = EXPAND_HOME in self.field.metadata or HomePath in get_args(self.field.annotation)
        return is_path or self.facts.ranks_may_differ

    def _sections(self) -> list[tuple[str, type[Section]]]:
        """The sections around the setting, outermost first, each with its dotted key."""
        sections = []
        for depth in range(1, len(self.path)):
            path = self.path[:depth]
            table = find(path)
            is_table_of_tables = table is not None and table.is_named_tables and table.path == path
            if table is not None and table.section is not None and not is_table_of_tables:
                sections.append((".".join(path), table.section))
        return sections


def _names_in(annotation: Any) -> Iterator[NameOf]:
    """Yield the `NameOf` in a type and the types in it. Tables of other settings have none."""
    if isinstance(annotation, NameOf):
        yield annotation
    parts = annotation if isinstance(annotation, (list, tuple)) else get_args(annotation)
    if get_origin(annotation) is not dict:
        for part in parts:
            yield from _names_in(part)


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    """Return the type without Annotated and without `| None`, and True if None is allowed."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _strip_optional(members[0])[0], len(members) < len(get_args(annotation))
    return annotation, False


_DESCRIPTIONS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {bool: "true and false", int: "integers", float: "numbers", str: "strings"}


def _describe(kind: Any) -> str:
    """Return a description of the values of a type."""
    if get_origin(kind) is Literal:
        words = [f'"{word}"' for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        if get_origin(item) is Literal:
            return "a list of: " + ", ".join(f'"{word}"' for word in get_args(item))
        if get_origin(item) is list:
            return "a list of lists of strings"
        return f"a list of {_PLURALS.get(item, 'values')}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Section)):
        return "a table of settings"
    return _DESCRIPTIONS.get(kind, "a value")


def _limits(metadata: list[Any]) -> str:
    """Return a description of the limits of a number or a string, such as ` > 0`, or ""."""
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
    """Yield the keys of one section in order. A sub-table is one key."""
    for name, field in section.model_fields.items():
        yield Setting((*prefix, name), field)


def dotted_names(config: JobConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the kind and the name of each function or class of user code that is named."""
    for path, value in leaves(config.model_dump()):
        setting = find(path)
        if setting is not None and (name_of := setting.name_of) is not None:
            for name in value if isinstance(value, list) else [value]:
                if name is not None and is_dotted(name):
                    yield ".".join(path), name_of.kind, name


def all_settings(section: type[Section] | None = None, prefix: Path = ()) -> Iterator[Setting]:
    """Yield every key of the schema, with the keys of sub-tables in place of the sub-tables.

    A table of named tables is yielded, and then the keys of one table under `<name>`.
    section: None: the whole configuration.
    """
    for setting in settings_of(section or job_config(), prefix):
        if setting.section is None:
            yield setting
        elif setting.is_named_tables:
            yield setting
            yield from all_settings(setting.section, (*setting.path, "<name>"))
        else:
            yield from all_settings(setting.section, setting.path)


def find(path: Path) -> Setting | None:
    """Return the Setting of a path, or None. For a key in a free table it is the table's."""
    section: type[Section] = job_config()
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
    """Return the names of the keys below a path.

    Empty if the path is not a table, or if users name its keys.
    """
    if not path:
        return list(job_config().model_fields)
    setting = find(path)
    if setting is None or setting.section is None:
        return []
    has_user_names = setting.is_named_tables and setting.path == path
    return [] if has_user_names else list(setting.section.model_fields)
