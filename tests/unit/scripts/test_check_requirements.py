"""The check of installed packages, which runs in a Python without packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import check_requirements
from scripts.check_requirements import release, unmet


@pytest.mark.parametrize(
    ("requirement", "version", "is_met"),
    [
        ("torch>=2.11", "2.11.0", True),
        ("torch>=2.11", "2.13.0+cpu", True),
        ("torch>=2.11", "2.14.1", True),
        ("torch>=2.11", "3.0.0", True),
        ("torch>=2.11", "2.9.1", False),  # compared as numbers, not as text
        ("torch>=2.11", None, False),
        ("numpy>=1.26,<3", "2.3.0", True),
        ("numpy>=1.26,<3", "3.0.0", False),
        ("pydantic>=2.7", "2.7", True),
        ("pydantic>=2.7", "2.7rc1", True),
        ("a-b==1.0", "1.0.0", True),
        ("a-b!=1.0", "1.0.0", False),
        ("tomli>=2.0; python_version < '3.9'", None, True),
        ("tomli>=2.0; python_version < '4.0'", None, False),
        ("anything", "0", True),
    ],
)
def test_an_unmet_requirement_is_reported(
    requirement: str, version: str | None, is_met: bool
) -> None:
    name = requirement.split(">")[0].split("=")[0].split("!")[0]
    problem = unmet(requirement, {} if version is None else {name: version})
    assert (problem is None) == is_met
    assert is_met or name in str(problem)


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("2.12.0.dev20260101", (2, 12, 0)), ("x", ())]
)
def test_release_parses_version_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


def test_every_line_of_pyproject_can_be_read() -> None:
    lines = check_requirements.requirements(["dev", "interop", "wandb", "float8"])
    assert len(lines) > 15
    for line in lines:
        unmet(line, {})


def test_this_python_meets_the_requirements() -> None:
    command = [sys.executable, check_requirements.__file__, "dev"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_missing_packages_of_a_bare_python_are_listed() -> None:
    command = [sys.executable, "-S", "-I", check_requirements.__file__]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "torch: not installed, expected >=2.11" in result.stdout
