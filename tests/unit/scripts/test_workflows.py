"""The workflows of GitHub run the scripts of this repository, with as few rights as possible.

tests/integration/test_release.py checks them with actionlint.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.runner import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ON = True  # YAML 1.1 reads the key "on" as a boolean
TRUSTS_CONTAINER = 'git config --global --add safe.directory "$GITHUB_WORKSPACE"'


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return content


def commands(path: Path) -> list[str]:
    """Return the commands of all jobs, except the one that every job in a container has."""
    steps = [step for job in jobs(path).values() for step in job["steps"] if "run" in step]
    return [step["run"] for step in steps if step["run"] != TRUSTS_CONTAINER]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_a_script_of_the_repository(path: Path) -> None:
    for command in commands(path):
        assert os.access(ROOT / command.split()[0], os.X_OK), command


def test_all_kinds_of_tests_run() -> None:
    run = {path.name: commands(path) for path in WORKFLOWS}
    assert run["tests.yml"] == ["./run_tests.sh --lint", ".ci/run", "./run_tests.sh -m gpu"]
    assert run["release.yml"] == ["scripts/build_release.sh dist"]
    [nightly] = jobs(ROOT / ".github/workflows/nightly.yml").values()
    help_text = (ROOT / "run_tests.sh").read_text()
    for mode in nightly["strategy"]["matrix"]["mode"]:
        assert f"./run_tests.sh {mode} " in help_text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_cannot_write_and_pin_their_actions(path: Path) -> None:
    """A tag of an action may move to other code."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    actions = [
        step["uses"] for job in jobs(path).values() for step in job["steps"] if "uses" in step
    ]
    assert actions
    for action in actions:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action)


def test_pull_requests_do_not_reach_the_gpu_runner() -> None:
    path = ROOT / ".github/workflows/tests.yml"
    assert "pull_request" in yaml.safe_load(path.read_text())[ON]
    gpu = jobs(path)["gpu"]
    assert "github.event_name == 'push'" in gpu["if"] and "GPU_RUNNER" in gpu["runs-on"]
