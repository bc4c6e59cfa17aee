"""Read descriptions of GPUs and clusters: TOML files in a folder of the package, or a user's."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.suggestions import nearest

T = TypeVar("T")


def names_in(folder: Path) -> list[str]:
    """Return the names of the descriptions in a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_description(name: str, folder: Path, what: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and the fields of a description, with its name as `key`.

    name: in the folder, or the path of a TOML file. what: that it describes, for an error.
    Raises ValueError if there is neither.
    """
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        names = names_in(folder)
        similar = nearest(name, names)
        remedy = f"did you mean {similar}?" if similar else "choose one, or write such a file"
        raise ValueError(
            f"there is no {what} {name!r}. Expected {', '.join(names)}, or a TOML file: {remedy}"
        ) from None
    return path, {"key": path.stem, **parse_toml(text)}


def create(kind: type[T], values: dict[str, Any], path: Path, what: str) -> T:
    """Return a dataclass with the fields of a description. Raises ValueError if they differ."""
    try:
        return kind(**values)
    except TypeError as error:
        wanted = ", ".join(sorted(signature(kind).parameters.keys() - {"key"}))
        raise ValueError(
            f"{path} does not describe a {what}: {error}. Expected the fields {wanted}: correct "
            "the file"
        ) from None
