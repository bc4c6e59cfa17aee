"""Register extensions: checks of the name, the signature and the type of a registration."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel

from torchtitan_like.config.aliases import MOVED_SECTIONS
from torchtitan_like.config.base import Facts, Section
from torchtitan_like.config.fields import find, settings_of
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.util import registry
from torchtitan_like.util.registry import KINDS, Kind, label
from torchtitan_like.util.suggestions import did_you_mean

Item = TypeVar("Item")

# Kind -> the setting that contains its names, and the arguments with which it is called.
SETTINGS: dict[Kind, tuple[str, ...]] = {
    "optimizer": ("optimizer", "name"),
    "lr_schedule": ("lr_scheduler", "name"),
    "loss": ("loss", "name"),
    "converter": ("model", "converters"),
    "data_source": ("data", "sources", "<name>", "format"),
    "sample_processor": ("data", "sources", "<name>", "processor"),
    "observer": ("metrics", "observers"),
}
PARAMETERS: dict[Kind, tuple[str, ...]] = {
    "optimizer": ("groups", "settings"),
    "lr_schedule": ("step", "total_steps", "settings"),
    "loss": ("logits", "labels", "settings"),
    "converter": ("model", "settings"),
    "data_source": ("path", "settings"),
    "sample_processor": ("record", "settings"),
    "observer": ("run_folder", "settings"),
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SECTION_NAME = re.compile(r"[a-z][a-z0-9_]*")


def register(kind: Kind, name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a function or class of this kind under `name`.

        @register("loss", "focal")
        def focal(logits, labels, settings): ...

    The decorator returns its argument. It raises ValueError for an unknown kind and for a name that
    is taken or malformed, and TypeError for a function with other parameters than its protocol.
    """
    frame = sys._getframe(1)
    origin = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def add(item: Item) -> Item:
        _check_name(kind, name, origin)
        if kind == "section":
            registry.add(kind, name, _as_section(name, item, origin), origin)
        else:
            _check_parameters(kind, name, item, origin)
            registry.add(kind, name, item, origin)
        return item

    return add


def _check_name(kind: Kind, name: str, origin: str) -> None:
    if kind not in KINDS:
        remedy = did_you_mean(kind, KINDS) or "correct it"
        raise ValueError(
            f"{origin} registers the kind {kind!r}. Expected one of {', '.join(KINDS)}: {remedy}"
        )
    pattern = _SECTION_NAME if kind == "section" else _NAME
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise ValueError(
            f"{origin} registers the {label(kind)} {name!r}. Expected a name of the form "
            f"{pattern.pattern}: correct it"
        )
    if name in built_in_names(kind):
        raise ValueError(
            f"{origin} registers the {label(kind)} {name!r}, which torchtitan_like has. Expected a "
            "new name: rename it"
        )


def built_in_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of this kind that the package has."""
    if kind == "section":
        return (*JobConfig.model_fields, *(path[0] for path in MOVED_SECTIONS))
    setting = find(SETTINGS[kind])
    assert setting is not None and setting.name_of is not None
    return setting.name_of.built_in


def _check_parameters(kind: Kind, name: str, item: Any, origin: str) -> None:
    parameters = PARAMETERS[kind]
    expected = f"{name}({', '.join(parameters)})"
    if not callable(item):
        raise TypeError(
            f"the {label(kind)} {name!r} at {origin} is {item!r}. Expected a function or a class "
            f"that can be called as {expected}: register one"
        )
    try:
        inspect.signature(item).bind(*parameters)
    except TypeError as error:
        raise TypeError(
            f"the {label(kind)} {name!r} at {origin} has the parameters "
            f"{inspect.signature(item)}. Expected to call it as {expected}, but {error}: change "
            "its parameters"
        ) from error


# ---- config sections


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
