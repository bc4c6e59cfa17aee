"""Layers of settings: reading TOML files (and the files they extend) and laying one layer over another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from torchtitan_like.config.problems import Problem
from torchtitan_like.util.bundle import find_config
from torchtitan_like.util.reading import read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Layer", "delete", "lay", "parse_toml", "read_files"]

MAX_BYTES = 2**24  # of a TOML file

Path = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """Settings of one origin as (path, value); ``origin`` is a file or "command line"."""

    origin: str
    leaves: list[tuple[Path, Any]]


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError, also for text that is nested too deeply or has integers of 10,000 digits."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def read_files(file: str, *, may_extend: bool = True) -> tuple[list[Layer], list[Problem]]:
    """Read a TOML file and all that it extends; the layers come base first."""
    layers: list[Layer] = []
    chain: list[FilePath] = []
    origin, mentioned_in = file, ""
    while True:
        path = FilePath(origin).expanduser()
        resolved = path.resolve()
        if resolved in chain:
            names = " -> ".join(step.name for step in [*chain[chain.index(resolved) :], resolved])
            expected = f"files that do not extend each other in a circle: {names}"
            return layers, [Problem("extends", origin, expected, "remove one of these `extends` lines", mentioned_in)]
        chain.append(resolved)
        table, problem = _read(path, mentioned_in)
        if problem is not None:
            return layers, [problem]
        base = table.pop("extends", None)
        layers.insert(0, Layer(origin, list(leaves(table))))
        if base is None:
            return layers, []
        if not may_extend:
            expected = "no `extends` in a config that is stored: it is complete, and names no other file"
            return layers, [Problem("extends", base, expected, "use the config of a checkpoint you trust", origin)]
        if not isinstance(base, str):
            return layers, [Problem("extends", base, "the path of one TOML file, in quotes", origin=origin)]
        origin, mentioned_in = os.path.normpath(find_config(base, path.parent)), origin


def _read(path: FilePath, mentioned_in: str) -> tuple[dict[str, Any], Problem | None]:
    """One file's content, or why it cannot be read. ``mentioned_in`` is the file that extends it, if any."""
    key = "extends" if mentioned_in else "job.config_file"
    where = mentioned_in or "command line"
    try:
        return parse_toml(read_file(path, MAX_BYTES).decode("utf-8-sig")), None
    except FileNotFoundError:
        folder = path.parent
        known = sorted(other.name for other in folder.glob("*.toml")) if folder.is_dir() else []
        remedy = f"{folder}/ holds: {', '.join(known[:12])}" if known else f"there is no TOML file in {folder}/"
        return {}, Problem(key, str(path), "an existing file", remedy, where)
    except UnicodeDecodeError as error:
        return {}, Problem("", None, f"UTF-8 text, byte {error.start} is not", "save the file as UTF-8", str(path))
    except ValueError as error:
        return {}, Problem("", None, f"valid TOML, found: {error}", "correct that line", str(path))
    except OSError as error:
        return {}, Problem(key, str(path), f"a readable file ({error.strerror})", "", where)


def leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value below ``table`` with its path; an empty table is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def lay(layers: list[Layer]) -> tuple[dict[str, Any], dict[Path, str]]:
    """Merge layers, the last one on top. Returns the nested tables and where each value came from."""
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
            if value == {} and isinstance(table.get(path[-1]), dict):
                continue
            if isinstance(table.get(path[-1]), dict):  # a table that the value replaces
                for below in [known for known in origins if known[: len(path)] == path]:
                    del origins[below]
            table[path[-1]] = value
            origins[path] = layer.origin
    return merged, origins


def delete(tables: dict[str, Any], path: Path) -> bool:
    """Remove what lies at ``path``; False if nothing lies there."""
    for name in path[:-1]:
        tables = tables.get(name, {})
        if not isinstance(tables, dict):
            return False
    return bool(path) and tables.pop(path[-1], _NOTHING) is not _NOTHING


_NOTHING = object()
