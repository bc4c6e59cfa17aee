"""A configuration as TOML text that can be loaded again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from torchtitan_like.config.base import Section
from torchtitan_like.config.fields import Path, settings_of
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.util.credentials import mask_values

_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


def dump_toml(config: JobConfig) -> str:
    """Return every setting with its resolved value, section by section, without credentials.

    TOML has no null: None is left out if it is the default, else it is written as the word "None".
    `job.config_file` is left out, because it has no effect in a file.
    """
    blocks: list[str] = []
    for setting in settings_of(type(config)):
        _write_section(getattr(config, setting.path[0]), setting.path, blocks)
    return "\n".join(blocks)


def extending_toml(
    config: JobConfig, settings: Mapping[str, Any], extends: str, comment: str
) -> str:
    """Return a TOML file that extends the one of a configuration with other settings.

    Settings of the command line are included. extends: see `path_to_extend`.
    """
    values = {
        key: config.value_of(key) for key in config.keys_of("command line") if "." in key
    } | dict(settings)
    values.pop("job.config_file", None)
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    text = f"# {comment}\nextends = {toml_value(extends)}\n"
    for section, rows in sections.items():
        text += f"\n[{section}]\n" + "".join(f"{row}\n" for row in rows)
    return text


def path_to_extend(given: str, found: FilePath, output: FilePath) -> str:
    """Return how `output` names the file that it extends.

    given: the path or name of the command line. found: the file. A bundled file keeps its name.
    """
    if found != FilePath(given).expanduser():
        return given
    return FilePath(os.path.relpath(found.resolve(), output.resolve().parent)).as_posix()


def _write_section(section: Section, path: Path, blocks: list[str]) -> None:
    """Append the TOML blocks of a section and its sub-tables."""
    lines = []
    tables = []
    for setting in settings_of(type(section), path):
        value = getattr(section, setting.path[-1])
        if setting.is_named_tables:
            tables += [(named, (*setting.path, name)) for name, named in value.items()]
        elif isinstance(value, Section) or setting.is_free:
            tables.append((value, setting.path))
        elif setting.key != "job.config_file" and not (value is None and setting.default is None):
            lines.append(f"{setting.path[-1]} = {toml_value(mask_values(value))}\n")
    if lines:
        blocks.append(f"[{_key(path)}]\n" + "".join(lines))
    for table, table_path in tables:
        if isinstance(table, Section):
            _write_section(table, table_path, blocks)
        elif table:
            values = {name: toml_value(mask_values(value)) for name, value in table.items()}
            body = "".join(f"{_key((name,))} = {value}\n" for name, value in values.items())
            blocks.append(f"[{_key(table_path)}]\n{body}")


def _key(path: Path) -> str:
    return ".".join(name if _BARE_KEY.match(name) else _string(name) for name in path)


def toml_value(value: Any) -> str:
    """Return a value as TOML text."""
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{_key((name,))} = {toml_value(item)}" for name, item in value.items())
        return "{" + ", ".join(items) + "}"
    return str(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
