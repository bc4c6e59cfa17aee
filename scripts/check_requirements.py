"""List the requirements of pyproject.toml that this Python does not meet. Exits with 1 if any.

Each line names the package, the installed release, and the expected one.

    python scripts/check_requirements.py [EXTRA ...]

It reads only the metadata of installed packages and imports none of them, so it takes a fraction of
a second. It needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OLDEST_PYTHON = (3, 10)
_REQUIREMENT = re.compile(
    r"^([\w.-]+)\s*((?:[<>=!]=?[\w.]+,?)*)\s*(?:;\s*python_version\s*<\s*'([\d.]+)')?$"
)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for "2.13.0+cpu". Suffixes are not compared."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def unmet(requirement: str, installed: dict[str, str] | None = None) -> str | None:
    """Return why `requirement` is not met, or None. installed: (name -> version), for tests."""
    match = _REQUIREMENT.match(requirement.strip())
    if match is None:
        raise ValueError(f"{PYPROJECT.name}: cannot read the requirement {requirement!r}")
    name, bounds, only_below = match.groups()
    if only_below and sys.version_info[:2] >= release(only_below):
        return None
    try:
        version = installed[name] if installed is not None else metadata.version(name)
    except (KeyError, metadata.PackageNotFoundError):
        return f"{name}: not installed, expected {bounds or 'any release'}"
    for bound in filter(None, bounds.split(",")):
        operator, limit = re.match(r"([<>=!]=?)(.*)", bound).groups()  # type: ignore[union-attr]
        if not _holds(release(version), operator, release(limit)):
            return f"{name}: found {version}, expected {bounds}"
    return None


def _holds(have: tuple[int, ...], operator: str, limit: tuple[int, ...]) -> bool:
    width = max(len(have), len(limit))
    have, limit = (numbers + (0,) * (width - len(numbers)) for numbers in (have, limit))
    return {
        ">=": have >= limit,
        "<=": have <= limit,
        ">": have > limit,
        "<": have < limit,
        "==": have == limit,
        "!=": have != limit,
    }[operator]


def requirements(extras: list[str]) -> list[str]:
    """Return the dependencies in pyproject.toml, with `extras`. Raises ImportError without a TOML reader."""
    found = (name for name in ("tomllib", "tomli") if importlib.util.find_spec(name) is not None)
    # A bare Python 3.10 has only pip's copy.
    toml = importlib.import_module(next(found, "pip._vendor.tomli"))
    project = toml.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]


def main(extras: list[str]) -> int:
    if extras[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        print(f"Python: found {sys.version.split()[0]}, expected >={oldest}")
        return 1
    try:
        required = requirements(extras)
    except ImportError:
        print("tomli: not installed, expected any release (Python 3.10 has no TOML reader)")
        return 1
    problems = [problem for requirement in required if (problem := unmet(requirement))]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
