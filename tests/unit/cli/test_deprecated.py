"""Deprecated scripts still work and name their replacement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from tests.unit.checkpoint.folders import make_steps


@pytest.mark.parametrize(
    ("script", "arguments", "command"),
    [
        ("checkpoint", ["verify", "."], "titan ckpt"),
        ("download_assets", ["--help"], "titan download"),
        ("export", ["--help"], "titan ckpt export"),
        ("generate", ["--help"], "titan generate"),
    ],
)
def test_a_script_runs_its_command(
    tmp_path: Path, script: str, arguments: list[str], command: str
) -> None:
    """Python does not search the working folder for modules."""
    make_steps(tmp_path, "10")
    (tmp_path / "argparse.py").write_text("raise SystemExit('imported from the working folder')")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", *arguments],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    notice = done.stderr.splitlines()[0]
    assert notice == f"scripts/{script}.py is deprecated: use `{command}`"
    assert done.returncode == 0, done.stderr
    expected = "step-10: intact, 100 B verified" if script == "checkpoint" else f"usage: {command}"
    assert expected in done.stdout
