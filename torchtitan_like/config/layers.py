"""Layers of settings: read TOML files with the files that they extend, and merge layers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from torchtitan_like.config.problems import Problem
from torchtitan_like.util.bundle import config_names, find_config
from torchtitan_like.util.reading import read_file
from torchtitan_like.util.suggestions import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Layer", "by_key", "delete", "leaves", "merge", "parse_toml", "read_files"]

MAX_BYTES = 2**24  # of a TOML file

Path = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """Settings of one origin as (path, value). origin: a file, or "command line"."""

    origin: str
    leaves: list[tuple[Path, Any]]


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError, also for deep nesting and for integers of 10,000 digits."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def read_files(file: str, *, may_extend: bool = True) -> tuple[list[Layer], list[Problem]]:
    """Read a TOML file and the files that it extends. Returns layers, base first, and problems."""
    layers: list[Layer] = []
    chain: list[FilePath] = []
    origin = str(find_config(file))
    extended_by = ""
    while True:
        path = FilePath(origin).expanduser()
        resolved = path.resolve()
        if resolved in chain:
            circle = [*chain[chain.index(resolved) :], resolved]
            names = " -> ".join(member.name for member in circle)
            expected = f"files that do not extend each other in a circle: {names}"
            remedy = "remove one of these `extends` lines"
            return layers, [Problem("extends", origin, expected, remedy, extended_by)]
        chain.append(resolved)
        table, problem = _read(path, extended_by)
        if problem is not None:
            return layers, [problem]
        base = table.pop("extends", None)
        layers.insert(0, Layer(origin, list(leaves(table))))
        if base is None:
            return layers, []
        if not may_extend:
            expected = "no `extends` in a stored configuration, which is complete"
            remedy = "use the configuration of a checkpoint that you trust"
            return layers, [Problem("extends", base, expected, remedy, origin)]
        if not isinstance(base, str):
            expected = "the path of one TOML file, in quotes"
            return layers, [Problem("extends", base, expected, origin=origin)]
        extended_by = origin
        origin = os.path.normpath(find_config(base, path.parent))


def _read(path: FilePath, extended_by: str) -> tuple[dict[str, Any], Problem | None]:
    """Return the content of a file, or a problem. extended_by: the file that extends it, or ""."""
    key = "extends" if extended_by else "job.config_file"
    origin = extended_by or "command line"
    try:
        return parse_toml(read_file(path, MAX_BYTES).decode("utf-8-sig")), None
    except FileNotFoundError:
        folder = path.parent
        names = sorted(file.name for file in folder.glob("*.toml")) if folder.is_dir() else []
        here = FilePath()
        bundled = [name for name in config_names() if folder in (here, FilePath(name).parent)]
        content = f"{folder}/ contains: {', '.join(names[:12])}"
        remedy = content if names else f"there is no TOML file in {folder}/"
        others = {*names, *bundled} - {FilePath(extended_by).name}
        name = path.name if names else str(path)
        remedy = did_you_mean(name, sorted(others)) or remedy
        return {}, Problem(key, str(path), "an existing file", remedy, origin)
    except UnicodeDecodeError as error:
        expected = f"UTF-8 text; byte {error.start} is not UTF-8"
        return {}, Problem("", None, expected, "save the file as UTF-8", str(path))
    except ValueError as error:
        return {}, Problem("", None, f"valid TOML; {error}", "correct that line", str(path))
    except OSError as error:
        return {}, Problem(
            key, str(path), f"a readable file ({error.strerror})", "check it", origin
        )


def leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value below a table with its path. An empty table is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def by_key(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting in tables by its dotted key. An empty table is no setting."""
    return {".".join(path): value for path, value in leaves(tables) if value != {}}


def merge(layers: list[Layer]) -> tuple[dict[str, Any], dict[Path, str]]:
    """Merge layers, the last one on top. Returns the nested tables and the origin of each value."""
    merged: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for layer in layers:
        for path, value in layer.leaves:
            table = merged
            for depth, name in enumerate(path[:-1], 1):
                if not isinstance(table.get(name), dict):
                    table[name] = {}
                    origins.pop(path[:depth], None)
                table = table[name]
            if isinstance(table.get(path[-1]), dict):
                if value == {}:
                    continue
                for replaced in [other for other in origins if other[: len(path)] == path]:
                    del origins[replaced]
            table[path[-1]] = value
            origins[path] = layer.origin
    return merged, origins


def delete(tables: dict[str, Any], path: Path) -> bool:
    """Remove the value at a path. Returns False if there is none."""
    for name in path[:-1]:
        tables = tables.get(name, {})
        if not isinstance(tables, dict):
            return False
    return bool(path) and tables.pop(path[-1], _NOTHING) is not _NOTHING


_NOTHING = object()
