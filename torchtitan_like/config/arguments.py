"""Parse `--section.key value` arguments into a layer of settings.

A value is converted to the type of its setting if possible. Otherwise it stays text, and the
schema reports it as it reports a wrong value in a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args, get_origin

from torchtitan_like.config.aliases import current_path
from torchtitan_like.config.fields import Path, Setting, all_settings, find
from torchtitan_like.config.layers import Layer, parse_toml
from torchtitan_like.config.problems import Problem
from torchtitan_like.util.credentials import MASK, is_secret_name, mask_text
from torchtitan_like.util.suggestions import did_you_mean

ORIGIN = "command line"
_BOOLEANS = {"true": True, "false": False}


class Flag(NamedTuple):
    """A flag: the path that it names, its setting, and True for the form `--section.no_key`."""

    path: Path
    setting: Setting | None
    is_negated: bool = False


def wants_help(argv: list[str]) -> bool:
    """Return True if the arguments ask for help."""
    return "--help" in argv or "-h" in argv


def last_value(argv: Sequence[str], path: Path) -> str | None:
    """Return the text after the last flag of a setting, without parsing the others.

    None if there is no such flag, or none with a value. `parse_arguments` reports the latter.
    """
    value = None
    remaining = [argument for argument in argv if _is_unicode(argument)]
    while remaining:
        name, equals_sign, text = remaining.pop(0).partition("=")
        if not name.startswith("--") or name[2:].replace("-", "_") != ".".join(path):
            continue
        if equals_sign:
            value = text
        elif remaining and not remaining[0].startswith("--"):
            value = remaining[0]
    return value


def parse_arguments(argv: list[str]) -> tuple[Layer, list[Problem]]:
    """Return the settings of all arguments, and the problems. The last of repeated flags wins."""
    leaves: dict[Path, Any] = {}
    problems = []
    for argument in argv:
        if not _is_unicode(argument):
            raw = argument.encode(errors="surrogateescape")
            expected = f'UTF-8 text, not "{raw.decode(errors="backslashreplace")}"'
            problems.append(Problem("", None, expected, "rename that file or folder", ORIGIN))
    remaining = [argument for argument in argv if _is_unicode(argument)]
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or argument[2:3] in ("", "="):
            problems.append(_unexpected_word(argument))
            continue
        name, equals_sign, value = argument[2:].partition("=")
        path, setting, is_negated = _parse_flag(name)
        if is_negated:
            if equals_sign:
                expected = "no value: the flag itself means false"
                problems.append(Problem(name, value, expected, f"write --{name}", ORIGIN))
            leaves[path] = False
            continue
        values = [value] if equals_sign else _take_values(remaining, setting)
        if values:
            leaves[path] = _convert(values, setting)
        elif setting is None:
            leaves[path] = ""
        elif setting.kind is bool or (setting.is_free and path != setting.path):
            leaves[path] = True
        else:
            expected = f"a value after it: {setting.expected}"
            problems.append(Problem(name, None, expected, f"write --{name} VALUE", ORIGIN))
    return Layer(ORIGIN, list(leaves.items())), problems


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments without credentials, as they may be recorded.

    Values of settings pass `mask_text`. All other values, and words that are no flags, are masked.
    """
    remaining = list(argv)
    masked = []
    while remaining:
        argument = remaining.pop(0)
        name, equals_sign, value = argument.removeprefix("--").partition("=")
        is_flag = argument.startswith("--") and re.fullmatch(r"[A-Za-z][\w.-]*", name)
        if not is_flag:
            masked.append(MASK)
            continue
        path, setting, _ = _parse_flag(name)
        values = [value] if equals_sign else _take_values(remaining, setting)
        is_hidden = setting is None or (setting.is_free and is_secret_name(path[-1]))
        values = [MASK if is_hidden else mask_text(value) for value in values]
        masked += [f"--{name}={values[0]}"] if equals_sign else [argument, *values]
    return masked


def _is_unicode(argument: str) -> bool:
    """Return False for bytes that are not UTF-8, such as file names may contain."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _unexpected_word(word: str) -> Problem:
    flags = flags_named(word)
    remedy = "write settings as --section.key value; separate the items of a list with commas"
    remedy = f"write {flags}" if flags else remedy
    return Problem("", None, f'a setting, not the word "{word}"', remedy, ORIGIN)


def flags_named(word: str) -> str:
    """Return the flags that `key=value` means, such as "--training.steps 5".

    The key may be the last part of several keys: the flags are joined with "or". "" if there is no
    such key, or no "=".
    """
    key, equals_sign, value = word.partition("=")
    path, setting, _ = _parse_flag(key)
    keys = [".".join(path)] if setting is not None and len(path) > 1 else _keys_with_name(key)
    if not equals_sign:
        return ""
    return " or ".join(f"--{key} {shlex.quote(value)}" for key in keys[:3])


def _parse_flag(name: str) -> Flag:
    """Parse the dotted name of a flag. `-` means `_`, except in names that users choose."""
    path: Path = ()
    for part in name.split("."):
        table = find(path) if path else None
        is_user_name = table is not None and (
            table.is_free or (table.is_named_tables and table.path == path)
        )
        path = (*path, part if is_user_name else part.replace("-", "_"))
    setting = find(current_path(path))
    if setting is None and path[-1].startswith("no_"):
        positive_path = (*path[:-1], path[-1].removeprefix("no_"))
        switch = find(current_path(positive_path))
        if switch is not None and switch.kind is bool:
            return Flag(positive_path, switch, is_negated=True)
    return Flag(path, setting)


def _take_values(remaining: list[str], setting: Setting | None) -> list[str]:
    """Remove the values of a flag from the remaining arguments, and return them."""
    if setting is not None and setting.kind is bool:
        limit = 1 if remaining and remaining[0].lower() in _BOOLEANS else 0
    elif setting is None or _is_list_of_lists(setting):
        limit = len(remaining)
    else:
        limit = 1
    values: list[str] = []
    while remaining and len(values) < limit and not remaining[0].startswith("--"):
        values.append(remaining.pop(0))
    return values


def _is_list_of_lists(setting: Setting) -> bool:
    return get_origin(setting.kind) is list and get_origin(get_args(setting.kind)[0]) is list


def _convert(values: list[str], setting: Setting | None) -> Any:
    """Convert the values of a flag to the type of its setting, or return text."""
    text = values[0]
    if setting is None:
        return " ".join(values)
    if text == "None" and len(values) == 1 and (setting.optional or setting.is_free):
        return None
    if setting.is_free and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if setting.is_free or setting.section is not None:
        return _parse_toml_value(text)
    if get_origin(setting.kind) is list:
        return _convert_list(values, setting)
    if setting.kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    if setting.kind in (int, float):
        try:
            return setting.kind(text)
        except ValueError:
            return text
    return text


def _convert_list(values: list[str], setting: Setting) -> Any:
    """Convert `a,b`, or `a,b c,d` for a list of lists, or a list as TOML writes it."""
    text = values[0]
    item_types = get_args(setting.kind)
    if text.startswith("["):
        value = _parse_toml_value(" ".join(values))
        # Of strings, text that is not a list is a pattern such as [ab]*.
        if item_types != (str,) or isinstance(value, list):
            return value
    if _is_list_of_lists(setting):
        if values == [""]:
            return []
        if get_args(item_types[0]) != (str,):
            return [[_parse_toml_value(item) for item in _split(group)] for group in values]
        return [_split(group) for group in values]
    items = _split(text)
    is_numeric = item_types in ((int,), (float,))
    return [_parse_toml_value(item) for item in items] if is_numeric else items


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parse_toml_value(text: str) -> Any:
    """Return the value that TOML reads: 256 for `256`, a list for `[1, 2]`, else the text."""
    if "\n" in text:
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:  # not TOML, or more digits than Python reads
        return text


def suggest_key(key: str) -> str:
    """Return the remedy for an unknown key: settings of that name elsewhere, or the nearest key."""
    if same_name := _keys_with_name(key.rsplit(".", 1)[-1]):
        names = " or ".join(f'"{candidate}"' for candidate in same_name[:3])
        return f"did you mean {names}?"
    return did_you_mean(key, [setting.key for setting in all_settings()])


def _keys_with_name(name: str) -> list[str]:
    """Return the keys whose last part is `name`."""
    name = name.replace("-", "_")
    keys = [setting.key for setting in all_settings() if setting.path[-1] == name]
    # optimizer.lr is meant more often than optimizer.groups.<name>.lr.
    return [key for key in keys if "<name>" not in key] or keys
