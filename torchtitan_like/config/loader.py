"""TOML file < command line -> one checked, frozen JobConfig, or every problem at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from torchtitan_like.config.aliases import modernise
from torchtitan_like.config.cli import ORIGIN as COMMAND_LINE
from torchtitan_like.config.cli import parse_arguments, suggest_key, wants_help
from torchtitan_like.config.fields import Path, find, names_at
from torchtitan_like.config.layers import Layer, delete, lay, read_files
from torchtitan_like.config.problems import ConfigError, Problem, nearest
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.util.modules import is_file_name

# What pydantic adds to the place of a fault: in a table's own names, and in a value that could be of two types.
_NO_KEYS = ("[key]", "int", "float")
MOST_SUGGESTIONS = 50  # in one configuration
CUSTOM_IMPORT = ("experimental", "custom_import")


def load_config(argv: list[str]) -> JobConfig:
    """Read ``--job.config_file`` and what it extends, lay the other arguments over it and check the whole.

    Precedence: command line > TOML file > file named by its ``extends`` > defaults. ``--help`` prints all settings and
    exits with 0. Raises ConfigError with every problem found.
    """
    if wants_help(argv):
        from torchtitan_like.config.document import help_text

        sys.stdout.write(help_text())
        raise SystemExit(0)
    arguments, problems = parse_arguments(argv)
    file = dict(arguments.leaves).get(("job", "config_file"))
    layers: list[Layer] = []
    unreadable: list[Problem] = []
    if file is not None:
        layers, unreadable = read_files(file)
    config = build_config([*layers, arguments], [*unreadable, *problems], complete=not unreadable)
    config._notices += tuple(_unread(layers))
    return config


def load_stored_config(file: FilePath, settings: Sequence[str] = ()) -> JobConfig:
    """Load the config that a run or a checkpoint has stored, with `settings` of the command line over it.

    It is complete: a file that it `extends` would be somebody else's choice of a file to read, and is refused. Raises
    ConfigError with every problem found.
    """
    arguments, problems = parse_arguments(list(settings))
    layers, unreadable = read_files(str(file), may_extend=False)
    return build_config([*layers, arguments], [*unreadable, *problems], complete=not unreadable)


def _unread(layers: list[Layer]) -> Iterator[Problem]:
    """A file that is named in a file is not read."""
    for layer in layers:
        for path, value in layer.leaves:
            if path == ("job", "config_file"):
                text = "has no effect in a file: it stands for a file to read on the command line alone"
                remedy = 'to start from another file write `extends = "..."` at the top'
                yield Problem("job.config_file", value, text, remedy, layer.origin, severity="warning")


def build_config(layers: list[Layer], problems: list[Problem] | None = None, *, complete: bool = True) -> JobConfig:
    """Check ``layers``, the last one on top.

    ``problems`` are those met while reading them; ``complete`` is False if a layer is missing. Raises ConfigError.
    """
    problems = list(problems or [])
    notices = []
    current = []
    for layer in layers:
        leaves, findings = modernise(layer.leaves, layer.origin)
        leaves = [(path, _none_word(path, value)) for path, value in leaves]
        leaves = [(path, _absolute_code_file(path, value, layer.origin)) for path, value in leaves]
        current.append(Layer(layer.origin, leaves))
        problems += [finding for finding in findings if finding.severity == "error"]
        notices += [finding for finding in findings if finding.severity == "warning"]
    merged, origins = lay(current)
    config, faulty = _validate(merged, origins, problems)
    if config is not None:
        config._origins.update({".".join(path): origin for path, origin in origins.items()})
        config._layers = tuple(layer.origin for layer in layers)
        config._notices = tuple(notices)
    if problems or config is None:
        partial = config if complete else None
        raise ConfigError([*problems, *notices], partial=partial, faulty=frozenset(faulty))
    return config


def _none_word(path: Path, value: Any) -> Any:
    """TOML has no null: the word "None" stands for it where None is allowed."""
    setting = find(path) if value == "None" else None
    return None if setting is not None and (setting.optional or setting.is_free) else value


def _absolute_code_file(path: Path, value: Any, origin: str) -> Any:
    """Return the absolute path of a Python file in experimental.custom_import.

    The path is relative to its TOML file, or to the current folder on the command line. Names of
    modules and other settings are returned unchanged.
    """
    if path != CUSTOM_IMPORT or not isinstance(value, str) or not is_file_name(value):
        return value
    folder = FilePath() if origin == COMMAND_LINE else FilePath(origin).parent
    return os.path.abspath(folder / os.path.expanduser(value))


def _validate(
    merged: dict[str, Any], origins: dict[Path, str], problems: list[Problem]
) -> tuple[JobConfig | None, set[str]]:
    """Validate; each faulty value is reported in ``problems``, put back to its default, and the rest validated again.

    So a conflict between two keys is found although a third one is misspelt. Returns the configuration that is left and
    the keys that were put back.
    """
    faulty: set[str] = set()
    while True:
        try:
            return JobConfig.model_validate(merged), faulty
        except ValidationError as invalid:
            removed = False
            for error in invalid.errors(include_url=False):
                path = tuple(part for part in error["loc"] if isinstance(part, str))
                if error["type"] == "broken_rules":
                    removed |= _report_broken_rules(path, error, merged, origins, faulty, problems)
                else:
                    if path[-1] in _NO_KEYS and error["type"] != "extra_forbidden" and find(path) is None:
                        path = path[:-1]
                    if ".".join(path) not in faulty:  # an item that could have been of two types is refused twice
                        problems.append(_explain(path, error, origins, len(problems) < MOST_SUGGESTIONS))
                    faulty.add(".".join(path))
                    removed |= delete(merged, path) or delete(merged, path[:-1])
            if not removed:
                return None, faulty


def _report_broken_rules(
    section: Path,
    error: Any,
    merged: dict[str, Any],
    origins: dict[Path, str],
    faulty: set[str],
    problems: list[Problem],
) -> bool:
    """Report the broken rules of one section and reset the keys that they involve to their defaults.

    Returns False if there was nothing to reset.
    """
    removed = False
    for problem in error["ctx"]["problems"]:
        paths = [(*section, name) for name in (problem.key, *problem.involves)]
        keys = [".".join(path) for path in paths]
        if not faulty.intersection(keys):
            setting = find(paths[0])
            value = error["input"].get(problem.key, setting.default if setting else None)
            default_origin = _origin_of(paths[0], origins)
            origin = next((origins[path] for path in paths if path in origins), default_origin)
            problems.append(
                replace(problem, key=keys[0], value=value, origin=origin, involves=tuple(keys[1:]))
            )
        for path in paths:
            removed |= delete(merged, path)
        faulty.update(key for key, path in zip(keys, paths, strict=True) if path in origins)
    return removed


def _explain(path: Path, error: Any, origins: dict[Path, str], may_suggest: bool) -> Problem:
    """One finding of pydantic in the words of this project. may_suggest: look for names that are near, which is slow."""
    key, kind, value = ".".join(path), error["type"], error["input"]
    origin = _origin_of(path, origins)
    if kind == "extra_forbidden":
        return _unknown(path, value, origin) if may_suggest else Problem(key, value, "a known setting", "", origin)
    setting = find(path)
    if setting is None:
        return Problem(key, value, error["msg"], "", origin)
    if kind == "missing":
        return Problem(key, None, setting.expected, f"add `{path[-1]} = ...`", origin)
    if setting.path != path and setting.is_named_tables:
        remedy = "" if isinstance(value, str) else f"write [{key}] and its settings below"
        return Problem(key, value, "a table of settings, named with letters, digits, - and _", remedy, origin)
    return Problem(key, value, setting.expected, _remedy(setting.expected, setting.choices, value), origin)


def _remedy(expected: str, choices: tuple[str, ...], value: Any) -> str:
    """How a value of the wrong type or spelling is corrected, where that can be told."""
    if isinstance(value, str):
        word = value.strip().lower()
        if choices:
            return nearest(value, choices)
        if _is_number(word) and expected.startswith("an integer") and not word.lstrip("+-").isdecimal():
            return f"write {int(float(word))}" if float(word).is_integer() else ""
        if _is_number(word) and expected.startswith(("an integer", "a number")):
            return f"remove the quotes: {word}"
        if word in ("true", "false") and expected.startswith("true or false"):
            return f"remove the quotes: {word}"
        return f'write ["{value}"]' if expected.startswith("a list of strings") else ""
    if isinstance(value, float) and value.is_integer() and expected.startswith("an integer"):
        return f"write {int(value)}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    wants_words = expected.startswith("a string") or ('"' in expected and not expected.startswith("a number"))
    return f'put it in quotes: "{value}"' if is_number and wants_words else ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _unknown(path: Path, value: Any, origin: str) -> Problem:
    """A section or key that the schema does not know."""
    key, parent = ".".join(path), path[:-1]
    siblings = names_at(parent)
    remedy = nearest(path[-1], siblings, prefix="".join(f"{name}." for name in parent))
    if isinstance(value, dict) and not parent:
        remedy = remedy or "sections are: " + ", ".join(siblings)
        return Problem(key, None, "a known section", remedy, origin)
    return Problem(key, value, "a known setting", remedy or suggest_key(key), origin)


def _origin_of(path: Path, origins: dict[Path, str]) -> str:
    """Where the value at ``path``, around it, or below it was written."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    for length in range(len(path), 0, -1):
        for known, origin in origins.items():
            if known[:length] == path[:length]:
                return origin
    return "default"
