"""docs/guides/parallelism.md shows the output of its command and names every rule."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.check.rules import RULES
from torchtitan_like.distributed.dims import ParallelDims


@pytest.fixture
def guide(repo_root: Path) -> str:
    return (repo_root / "docs/guides/parallelism.md").read_text()


def read_command(guide: str, start: str) -> tuple[list[str], str]:
    """Return the arguments of a command in the guide, and its output."""
    (match,) = re.findall(
        rf"```bash\n({re.escape(start)}.*?)\n```\n\n```\n(.*?)\n```", guide, re.DOTALL
    )
    return shlex.split(match[0])[1:], match[1]


@pytest.mark.nightly
def test_the_count_equals_the_collectives_of_a_step(guide: str, repo_root: Path) -> None:
    arguments, output = read_command(guide, "python scripts/count_collectives.py")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=repo_root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == f"{output}\n", done.stdout + done.stderr


def test_the_mesh_is_as_in_the_log(guide: str) -> None:
    assert ParallelDims(8, pp=2, dp_shard=2, tp=2).describe(4) in guide


def test_every_rule_is_named(guide: str) -> None:
    (table,) = re.findall(r"\| rule \| what is refused \|\n(.*)", guide, re.DOTALL)
    named = re.findall(
        r"`([\w-]+)`",
        "\n".join(row.split("|")[1] for row in table.splitlines() if row.startswith("|")),
    )
    assert sorted(named) == sorted(rule.name for rule in RULES if rule.severity == "error")
