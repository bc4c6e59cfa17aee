"""Import the function or class that a setting names as "module:name"."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torchtitan_like.util.modules import describe_line, package_of
from torchtitan_like.util.suggestions import did_you_mean

# Kind of a `config.base.NameOf` -> the arguments of the call that its protocol describes.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "optimizer": ("groups", "settings"),
    "learning-rate schedule": ("step", "total_steps", "settings"),
    "loss": ("logits", "labels", "settings"),
    "converter": ("model", "settings"),
    "data source": ("path", "settings"),
    "sample processor": ("record", "settings"),
    "observer": ("run_folder", "settings"),
}


class ExtensionError(Exception):
    """User code cannot be imported, or does not follow its protocol.

    problem, remedy: the two parts of the message.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


def resolve_name(name: str, kind: str) -> Any:
    """Return the function or class `name`, "module:name", after importing its module.

    kind: a key of `PARAMETERS`. Raises ExtensionError if the module cannot be imported, or does not
    define such a name, and for other parameters than the protocol's.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package_of(name)
        remedy = "add the folder of the module to PYTHONPATH" if is_absent else "correct it"
        raise ExtensionError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}"
            f"{describe_line(error)}. Expected no error",
            remedy,
        ) from error
    if not hasattr(module, attribute):
        remedy = did_you_mean(attribute, vars(module), f"{module_name}:") or "correct it"
        raise ExtensionError(
            f"the module {module_name} has no {attribute}. Expected the name of a {kind}",
            remedy,
        )
    item = getattr(module, attribute)
    expected = f"{attribute}({', '.join(PARAMETERS[kind])})"
    if not callable(item):
        raise ExtensionError(
            f"the {kind} {name} is {item!r}. Expected a function or a class that can be called as "
            f"{expected}",
            "name one",
        )
    # A checkpoint must not choose another function that the module imports.
    home = str(getattr(item, "__module__", None))
    if package_of(home) != package_of(name):
        raise ExtensionError(
            f"the {kind} {name} is defined in {home}. Expected a function or a class that "
            f"{package_of(name)} defines",
            "define one that calls it",
        )
    try:
        inspect.signature(item).bind(*PARAMETERS[kind])
    except (TypeError, ValueError) as error:
        raise ExtensionError(
            f"the {kind} {name} cannot be called as {expected}: {error}. Expected the parameters "
            "of the protocol",
            "change them",
        ) from error
    return item
