"""Load a configuration: TOML files and the command line become one checked, frozen JobConfig."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from torchtitan_like.config.aliases import use_current_names
from torchtitan_like.config.arguments import ORIGIN as COMMAND_LINE
from torchtitan_like.config.arguments import (
    flags_named,
    last_value,
    parse_arguments,
    suggest_key,
    wants_help,
)
from torchtitan_like.config.fields import Path, dotted_names, find, names_at
from torchtitan_like.config.layers import Layer, delete, merge, read_files
from torchtitan_like.config.problems import ConfigError, Problem
from torchtitan_like.config.schema import JobConfig, job_config
from torchtitan_like.util.modules import describe_line, import_named, is_file_name, package_of
from torchtitan_like.util.suggestions import did_you_mean

# Path components of pydantic errors that are no keys: for the names of tables, and for unions.
_NO_KEYS = ("[key]", "int", "float")
# Types of pydantic errors whose message a validator has written.
_OWN_MESSAGE = ("value_error", "assertion_error")
# Suggestions for misspelled names are slow to compute.
MAX_SUGGESTIONS = 50
USAGE = """\
usage: titan train X.toml [--section.key VALUE ...]
       torchrun -m torchtitan_like.train --job.config_file X.toml [--section.key VALUE ...]
"""
CONFIG_FILE = ("job", "config_file")
CUSTOM_IMPORT = ("experimental", "custom_import")
CUSTOM_IMPORT_KEY = ".".join(CUSTOM_IMPORT)


class CommandLine:
    """A command line and the TOML files that it names. Each is read and parsed once.

    argv: `--job.config_file` and other settings. base: a configuration that the settings override,
    instead of a file. is_checked: True if the launcher has read the files, and checked all that
    they name.
    """

    is_checked = False

    def __init__(self, argv: Sequence[str], base: JobConfig | None = None) -> None:
        self.argv = list(argv)
        self._files: list[Layer] = [] if base is None else _layers_of(base)
        self._unreadable: list[Problem] = []
        if (file := last_value(self.argv, CONFIG_FILE)) is not None:
            self._files, self._unreadable = read_files(file)
        self._import_problems: list[Problem] | None = None  # None: nothing was imported yet
        self._loaded: JobConfig | ConfigError | None = None

    def import_extensions(self) -> list[Problem]:
        """Import the module of `experimental.custom_import`, which registers models and sections.

        Returns the problem of an import that fails. A second call imports nothing.
        """
        if self._import_problems is None:
            self._import_problems = self._import_extensions()
        return self._import_problems

    def _import_extensions(self) -> list[Problem]:
        chosen = [
            (layer.origin, value)
            for layer in self._files
            for path, value in layer.leaves
            if path == CUSTOM_IMPORT and isinstance(value, str)
        ]
        if (value := last_value(self.argv, CUSTOM_IMPORT)) is not None:
            chosen.append((COMMAND_LINE, value))
        origin, name = chosen[-1] if chosen else ("", "")
        if not name:
            return []
        problem = import_module(_absolute_code_file(CUSTOM_IMPORT, name, origin), origin)
        self._loaded = None  # the module may have registered sections
        return [] if problem is None else [problem]

    def load(self) -> JobConfig:
        """Return the configuration. Imports no user code: see `import_extensions`.

        Precedence: command line > TOML file > the file that it extends > defaults. `--help` prints
        the common settings and exits with 0. Raises ConfigError with every problem.
        """
        if self._loaded is None:
            try:
                self._loaded = self._load()
            except ConfigError as error:
                self._loaded = error
        if isinstance(self._loaded, ConfigError):
            raise self._loaded
        return self._loaded

    def _load(self) -> JobConfig:
        if wants_help(self.argv):
            from torchtitan_like.config.document import common_help

            print(f"{USAGE}\n{common_help()}")
            raise SystemExit(0)
        arguments, problems = parse_arguments(self.argv)
        problems = [*self._unreadable, *problems]
        config = build_config([*self._files, arguments], problems, complete=not self._unreadable)
        config._notices += tuple(_ignored_config_files(self._files))
        return _in_folder_of_group(config)


def _layers_of(config: JobConfig) -> list[Layer]:
    """Return the layers from which a configuration was loaded."""
    layers = []
    for origin in config._layers:
        keys = [key for key in config.keys_of(origin) if key != ".".join(CONFIG_FILE)]
        leaves = [(tuple(key.split(".")), config.value_of(key)) for key in keys]
        layers.append(Layer(origin, leaves))
    return layers


def import_module(name: str, origin: str = "") -> Problem | None:
    """Import the user's module or .py file of that name. "" is no module.

    origin: where the name was written. Returns the problem of an import that fails.
    """
    try:
        if name:
            import_named(name)
    except Exception as error:  # user code may raise anything
        expected = (
            "a module or a .py file that can be imported; "
            f"{type(error).__name__}: {error}{describe_line(error)}"
        )
        remedy = "correct it"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            remedy = "add the module's folder to PYTHONPATH"
        return Problem(CUSTOM_IMPORT_KEY, name, expected, remedy, origin)
    return None


def load_config(argv: Sequence[str]) -> JobConfig:
    """Load and check the configuration of a command line: see `CommandLine.load`."""
    return CommandLine(argv).load()


def _in_folder_of_group(config: JobConfig) -> JobConfig:
    """Return the configuration with the run folder of its replica group, <dump_folder>/replica_<id>.

    The groups of a job have the same job.dump_folder, and each is a run. A configuration that a
    group has stored has its folder already.
    """
    section, folder = config.fault_tolerance, FilePath(config.job.dump_folder)
    name = f"replica_{section.replica_id}"
    if not section.enable or folder.name == name:
        return config
    job = config.job.model_copy(update={"dump_folder": str(folder / name)})
    return config.model_copy(update={"job": job})


def load_stored_config(file: FilePath, settings: Sequence[str] = (), module: str = "") -> JobConfig:
    """Load the configuration that a run or a checkpoint has stored.

    A stored configuration is complete. Its author must not choose files of this machine to read, so
    `extends` is refused. Nor may the author choose modules to import: names of user code are
    refused, except in `settings` and in the package of `module`.

    settings: arguments that override it. module: that the user's command names, or "".
    Raises ConfigError with every problem.
    """
    arguments, problems = parse_arguments(list(settings))
    layers, unreadable = read_files(str(file), may_extend=False)
    return build_config(
        [*layers, arguments],
        [*unreadable, *problems],
        complete=not unreadable,
        check=lambda config: _untrusted_names(config, module),
    )


def _untrusted_names(config: JobConfig, module: str) -> Iterator[Problem]:
    """Yield a problem for each name of user code that neither the user nor `module` has given."""
    trusted = "" if is_file_name(module) else package_of(module)
    for key, kind, name in dotted_names(config):
        package, origin = package_of(name), config.origin_of(key)
        if origin != COMMAND_LINE and package != trusted:
            expected = f"a {kind} of a module that the command names, because its import runs code"
            remedy = (
                f"if you trust it: --{CUSTOM_IMPORT_KEY} {package}, with its folder in PYTHONPATH"
            )
            yield Problem(key, name, expected, remedy, origin)


def _ignored_config_files(layers: list[Layer]) -> Iterator[Problem]:
    """Yield a warning for each file that sets job.config_file."""
    for layer in layers:
        for path, value in layer.leaves:
            if path == CONFIG_FILE:
                yield Problem(
                    "job.config_file",
                    value,
                    "has no effect in a file: only the command line names the file to read",
                    'to extend another file, write `extends = "..."` at the top',
                    layer.origin,
                    severity="warning",
                )


def build_config(
    layers: list[Layer],
    problems: list[Problem] | None = None,
    *,
    complete: bool = True,
    check: Callable[[JobConfig], Iterable[Problem]] = lambda config: (),
) -> JobConfig:
    """Merge layers, the last one on top, and check the result.

    problems: from reading the layers. complete: False if a layer is missing. check: yields problems
    of the valid settings.
    Raises ConfigError with every problem.
    """
    problems = list(problems or [])
    notices = []
    current = []
    for layer in layers:
        leaves, alias_problems = use_current_names(layer.leaves, layer.origin)
        leaves = [(path, _parse_none(path, value)) for path, value in leaves]
        leaves = [(path, _absolute_code_file(path, value, layer.origin)) for path, value in leaves]
        current.append(Layer(layer.origin, leaves))
        problems += [problem for problem in alias_problems if problem.severity == "error"]
        notices += [problem for problem in alias_problems if problem.severity == "warning"]
    merged, origins = merge(current)
    config, faulty = _validate(merged, origins, problems)
    if config is not None:
        config._origins.update({".".join(path): origin for path, origin in origins.items()})
        config._layers = tuple(layer.origin for layer in layers)
        config._notices = tuple(notices)
        problems += check(config)
    if problems or config is None:
        partial = config if complete else None
        raise ConfigError([*problems, *notices], partial=partial, faulty=frozenset(faulty))
    return config


def _parse_none(path: Path, value: Any) -> Any:
    """Return None for the word "None" where None is allowed, else the value. TOML has no null."""
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
    """Validate the merged tables, and add each faulty value to `problems`.

    A faulty value is reset to its default, and the rest is validated again. So a misspelled key
    does not hide a conflict between two others. Returns the configuration, or None, and the keys
    of the reset values.
    """
    faulty: set[str] = set()
    while True:
        try:
            return job_config().model_validate(merged), faulty
        except ValidationError as invalid:
            removed = False
            for error in invalid.errors(include_url=False):
                path = tuple(part for part in error["loc"] if isinstance(part, str))
                if error["type"] == "broken_rules":
                    removed |= _report_broken_rules(path, error, merged, origins, faulty, problems)
                else:
                    is_unknown = error["type"] == "extra_forbidden"
                    if path[-1] in _NO_KEYS and not is_unknown and find(path) is None:
                        path = path[:-1]
                    if ".".join(path) not in faulty:  # pydantic reports each type of a union
                        may_suggest = len(problems) < MAX_SUGGESTIONS
                        problems.append(_explain(path, error, origins, may_suggest))
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
    """Report the broken rules of one section and reset their keys to the defaults.

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
    """Translate an error of pydantic. may_suggest: search for similar names, which is slow."""
    key = ".".join(path)
    kind = error["type"]
    value = error["input"]
    origin = _origin_of(path, origins)
    if kind == "extra_forbidden":
        if may_suggest:
            return _describe_unknown(path, value, origin)
        return Problem(key, value, "a known setting", "", origin)
    setting = find(path)
    if setting is None:
        return Problem(key, value, error["msg"], "", origin)
    if kind == "missing":
        return Problem(key, None, setting.expected, f"add `{path[-1]} = ...`", origin)
    if setting.path != path and setting.is_named_tables:
        remedy = "" if isinstance(value, str) else f"write [{key}] and its settings below"
        expected = "a table of settings, named with letters, digits, - and _"
        return Problem(key, value, expected, remedy, origin)
    if kind in _OWN_MESSAGE and not setting.is_described:  # by the validator of a user's section
        return Problem(key, value, f"{setting.expected}; {error['msg']}", "", origin)
    remedy = _suggest_value(setting.expected, setting.choices, value)
    return Problem(key, value, setting.expected, remedy, origin)


def _suggest_value(expected: str, choices: tuple[str, ...], value: Any) -> str:
    """Return the remedy for a value of the wrong type or spelling, or ""."""
    if isinstance(value, str):
        word = value.strip().lower()
        if choices:
            return did_you_mean(value, choices)
        is_decimal = word.lstrip("+-").isdecimal()
        if _is_number(word) and expected.startswith("an integer") and not is_decimal:
            return f"write {int(float(word))}" if float(word).is_integer() else ""
        if _is_number(word) and expected.startswith(("an integer", "a number")):
            return f"remove the quotes: {word}"
        if word in ("true", "false") and expected.startswith("true or false"):
            return f"remove the quotes: {word}"
        return f'write ["{value}"]' if expected.startswith("a list of strings") else ""
    if isinstance(value, float) and value.is_integer() and expected.startswith("an integer"):
        return f"write {int(value)}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_choice = '"' in expected and not expected.startswith("a number")
    expects_string = expected.startswith("a string") or is_choice
    return f'put it in quotes: "{value}"' if is_number and expects_string else ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _describe_unknown(path: Path, value: Any, origin: str) -> Problem:
    """Return the problem of a section or key that the schema does not have."""
    key = ".".join(path)
    parent = path[:-1]
    siblings = names_at(parent)
    remedy = did_you_mean(path[-1], siblings, prefix="".join(f"{name}." for name in parent))
    if isinstance(value, dict) and not parent:
        remedy = remedy or (
            f"sections are: {', '.join(siblings)}; {CUSTOM_IMPORT_KEY} names the module that "
            "registers others"
        )
        involves = (CUSTOM_IMPORT_KEY,)
        return Problem(key, None, "a known section", remedy, origin, involves=involves)
    if origin == COMMAND_LINE and not parent and value:
        first, *_ = str(value).split(maxsplit=1)
        flags = flags_named(f"{key}={first}")
        remedy = f"write {flags}" if flags else remedy
    return Problem(key, value, "a known setting", remedy or suggest_key(key), origin)


def _origin_of(path: Path, origins: dict[Path, str]) -> str:
    """Return the origin of the value at a path, of a table around it, or of a value below it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    for length in range(len(path), 0, -1):
        for written, origin in origins.items():
            if written[:length] == path[:length]:
                return origin
    return "default"
