"""The command line as one more layer of settings: ``--section.key value``.

Words are turned into the type the schema names where that is possible and left as text where it is not: judging them
is left to the schema, as for a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from torchtitan_like.config.aliases import current_path
from torchtitan_like.config.fields import Path, Setting, all_settings, find
from torchtitan_like.config.layers import Layer, parse_toml
from torchtitan_like.config.problems import Problem, nearest
from torchtitan_like.util.credentials import MASK, is_secret_name, mask_text

ORIGIN = "command line"
_BOOLEANS = {"true": True, "false": False}


def wants_help(argv: list[str]) -> bool:
    """True if the reader asks what can be set."""
    return "--help" in argv or "-h" in argv


def parse_arguments(argv: list[str]) -> tuple[Layer, list[Problem]]:
    """Read all of ``argv``; returns its settings (the last one wins) and what could not be understood."""
    leaves: dict[Path, Any] = {}
    problems = []
    words = [word for word in argv if _is_text(word)]
    for word in argv:
        if not _is_text(word):
            shown = word.encode(errors="surrogateescape").decode(errors="backslashreplace")
            expected = f'UTF-8 text, found the word "{shown}": the configuration is written down with each run'
            problems.append(Problem("", None, expected, "rename that file or folder", ORIGIN))
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word[2:3] in ("", "="):
            problems.append(_stray(word))
            continue
        name, has_value, text = word[2:].partition("=")
        path, setting, negated = _locate(name)
        if negated:
            if has_value:
                expected = "no value: the flag itself means false"
                problems.append(Problem(name, text, expected, f"write --{name}", ORIGIN))
            leaves[path] = False
            continue
        texts = [text] if has_value else _take_values(words, setting)
        if not texts and setting is not None and (setting.kind is bool or (setting.is_free and path != setting.path)):
            leaves[path] = True
        elif not texts and setting is not None:
            expected = f"a value after it: {setting.expected}"
            problems.append(Problem(name, None, expected, f"write --{name} VALUE", ORIGIN))
        else:
            leaves[path] = _convert(texts, setting, path) if texts else ""
    return Layer(ORIGIN, list(leaves.items())), problems


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """Return `argv` as it may be recorded: values of settings pass `mask_text`, all other values are masked.

    Of an option that the schema does not have, only the name is left; of a stray word, nothing.
    """
    words, masked = list(argv), []
    while words:
        word = words.pop(0)
        name, has_value, text = word[2:].partition("=")
        if not re.fullmatch(r"--[A-Za-z][\w.-]*", f"--{name}") or not word.startswith("--"):
            masked.append(MASK)
            continue
        path, setting, _ = _locate(name)
        texts = [text] if has_value else _take_values(words, setting)
        is_hidden = setting is None or (setting.is_free and is_secret_name(path[-1]))
        texts = [MASK if is_hidden else mask_text(value) for value in texts]
        masked += [f"--{name}={texts[0]}"] if has_value else [word, *texts]
    return masked


def _is_text(word: str) -> bool:
    """False for bytes that are no UTF-8, such as names of files may have."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def _stray(word: str) -> Problem:
    remedy = "write settings as --section.key value; separate the items of a list with commas"
    return Problem("", None, f'a setting, found the stray word "{word}"', remedy, ORIGIN)


def _locate(name: str) -> tuple[Path, Setting | None, bool]:
    """The path a flag means, what the schema says of it, and whether the flag is the ``no_`` form of a switch."""
    path: Path = ()
    for part in name.split("."):
        parent = find(path) if path else None
        own_name = parent is not None and (parent.is_free or (parent.is_named_tables and parent.path == path))
        path = (*path, part if own_name else part.replace("-", "_"))
    setting = find(current_path(path))
    if setting is None and path[-1].startswith("no_"):
        positive = (*path[:-1], path[-1].removeprefix("no_"))
        switch = find(current_path(positive))
        if switch is not None and switch.kind is bool:
            return positive, switch, True
    return path, setting, False


def _take_values(words: list[str], setting: Setting | None) -> list[str]:
    """Remove from ``words`` the values that belong to a flag: as many as its kind can have."""
    if setting is not None and setting.kind is bool:
        limit = 1 if words and words[0].lower() in _BOOLEANS else 0
    elif setting is None or _is_list_of_lists(setting):
        limit = len(words)
    else:
        limit = 1
    taken: list[str] = []
    while words and len(taken) < limit and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _is_list_of_lists(setting: Setting) -> bool:
    return get_origin(setting.kind) is list and get_origin(get_args(setting.kind)[0]) is list


def _convert(texts: list[str], setting: Setting | None, path: Path) -> Any:
    text = texts[0]
    if setting is None:
        return " ".join(texts)
    if text == "None" and len(texts) == 1 and (setting.optional or setting.is_free):
        return None
    if setting.is_free and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if setting.is_free or setting.section is not None:
        return _toml_value(text)
    if get_origin(setting.kind) is list and text.startswith("["):
        value = _toml_value(" ".join(texts))  # as in a file
        if get_args(setting.kind) != (str,) or isinstance(value, list):  # else a pattern, as in [ab]*
            return value
    if _is_list_of_lists(setting):
        if texts == [""]:
            return []
        if get_args(get_args(setting.kind)[0]) != (str,):
            return [[_toml_value(item) for item in _split(group)] for group in texts]
        return [_split(group) for group in texts]
    if get_origin(setting.kind) is list:
        return list(map(_toml_value, _split(text))) if get_args(setting.kind) == (int,) else _split(text)
    if setting.kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    if setting.kind in (int, float):
        try:
            return setting.kind(text)
        except ValueError:
            return text
    return text


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _toml_value(text: str) -> Any:
    """``256`` -> 256, ``[1, 2]`` -> list, ``abc`` -> "abc"."""
    if "\n" in text:
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:  # no TOML, or more digits than Python reads
        return text


def suggest_key(key: str) -> str:
    """The remedy for a key that no section knows: the setting of that name elsewhere, or the most similar one."""
    keys = [setting.key for setting in all_settings()]
    name = key.rsplit(".", 1)[-1]
    same_name = [known for known in keys if known.rsplit(".", 1)[-1] == name]
    if same_name:
        return "did you mean " + " or ".join(f'"{known}"' for known in same_name[:3]) + "?"
    return nearest(key, keys)
