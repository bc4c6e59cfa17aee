"""Register config sections of user code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel

from torchtitan_like.config.aliases import MOVED_SECTIONS
from torchtitan_like.config.base import Facts, Section
from torchtitan_like.config.fields import settings_of
from torchtitan_like.config.schema import JobConfig, add_section

Item = TypeVar("Item")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
BUILT_IN = (*JobConfig.model_fields, *(path[0] for path in MOVED_SECTIONS))


def register_section(name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a pydantic class as the config section `name`.

        @register_section("my_section")
        class MySection(BaseModel): ...

    The decorator returns its argument. It raises ValueError for a name that is taken or malformed,
    and TypeError for another class, and for settings that TOML cannot express or without a default.
    """
    frame = sys._getframe(1)
    origin = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def add(item: Item) -> Item:
        problem = ""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problem = f". Expected a name of the form {_NAME.pattern}: correct it"
        elif name in BUILT_IN:
            problem = ", which torchtitan_like has. Expected a new name: rename it"
        if problem:
            raise ValueError(f"{origin} registers the config section {name!r}{problem}")
        add_section(name, _as_section(name, item, origin), origin)
        return item

    return add


def _as_section(name: str, model: Any, origin: str) -> type[Section]:
    """Return the user's pydantic class as a strict section.

    Unknown keys and conversions of types are errors, whatever the class allows. Settings that do
    not declare what they affect are fixed on resume.
    """
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise TypeError(
            f"the config section {name!r} at {origin} is {model!r}. Expected a subclass of "
            "pydantic.BaseModel or of extensions.Section: register one"
        )
    section = _with_facts(model)
    if problems := list(_section_problems(section, (name,))):
        raise TypeError(f"the config section {name!r} at {origin}: {'; '.join(problems)}")
    return section


def _with_facts(model: type[BaseModel]) -> type[Section]:
    if issubclass(model, Section) and model.facts.affects is not None:
        return model
    # Of several base classes, the last one decides how strict the validation is.
    bases = (model,) if issubclass(model, Section) else (model, Section)
    facts = Facts(affects="numerics", needs=getattr(model, "facts", Facts()).needs)
    doc = model.__doc__ or "Settings of user code."
    members = {"__doc__": doc, "__module__": model.__module__, "facts": facts}
    return type(model.__name__, bases, members)


def _section_problems(section: type[Section], path: tuple[str, ...]) -> Iterator[str]:
    """Yield what is wrong with the settings of a section."""
    for setting in settings_of(section, path):
        if setting.is_required:
            yield f"{setting.key} has no default. Expected one, because the section may be left out"
        elif setting.section is not None:
            yield from _section_problems(setting.section, setting.path)
        elif not _is_toml_type(setting.kind):
            yield (
                f"{setting.key} is of type {setting.field.annotation}. Expected bool, int, float, "
                "str, a Literal of strings, a list of these, dict[str, Any] or an "
                "extensions.Section"
            )


def _is_toml_type(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        return _is_toml_type(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return all(isinstance(word, str) for word in get_args(kind))
    return kind in (bool, int, float, str) or get_origin(kind) is dict
