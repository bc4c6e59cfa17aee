"""The recipes of the guides copy steps to an archive and verify the copies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from tests.unit.checkpoint.folders import SHARD, flip_bit, make_steps
from torchtitan_like.cli import main

RSYNC = """#!/usr/bin/env bash
[ "$1" = -a ] && cp -a "$2" "$3"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with `titan` and, where rsync is not installed, a replacement for it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {"titan": f'#!/usr/bin/env bash\nexec {sys.executable} -m torchtitan_like "$@"\n'}
    if shutil.which("rsync") is None:
        scripts["rsync"] = RSYNC
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run_recipe(
    guide: str, mark: str, paths: dict[str, Path], programs: Path, *, before_verify: str = ":"
) -> subprocess.CompletedProcess[str]:
    """Run the block of a guide that contains `mark`. before_verify: a command to insert."""
    text = (ROOT / "docs/guides" / guide).read_text()
    (block,) = [
        code for code in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M) if mark in code
    ]
    for documented, path in paths.items():
        block = block.replace(documented, str(path))
    block = block.replace("titan ckpt verify", f"{before_verify} && titan ckpt verify")
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", block], env=env, text=True, capture_output=True)


def test_a_copy_is_verified(tmp_path: Path, programs: Path) -> None:
    make_steps(tmp_path / "run/checkpoint", "500")
    archive = tmp_path / "archive"
    archive.mkdir()
    paths = {"outputs/checkpoint": tmp_path / "run/checkpoint", "/archive/run-7": archive}
    copy = archive / "step-500"
    done = run_recipe("checkpoint.md", "titan ckpt verify /archive", paths, programs)
    assert done.returncode == 0 and f"{copy}: intact, 100 B verified" in done.stdout, done.stderr
    flip_bit(copy / SHARD, 9)
    assert main(["ckpt", "verify", str(copy)]) == 1
    (copy / SHARD).unlink()
    assert main(["ckpt", "verify", str(copy)]) == 1


def test_the_cron_job_archives_each_complete_step_once(tmp_path: Path, programs: Path) -> None:
    make_steps(tmp_path / "run", "10", "20", "30?")
    archive = tmp_path / "archive"
    archive.mkdir()
    paths = {"/shared/run1/checkpoint": tmp_path / "run", "/archive/run1": archive}
    paths["python slurm/notify.py"] = Path("echo")
    damage = f'{{ [ $step != step-20 ] || printf x >> "{archive}/step-20/{SHARD}"; }}'
    failed = run_recipe("operations.md", "rsync", paths, programs, before_verify=damage)
    assert "--webhook run1: step-20 is not archived" in failed.stdout, failed.stderr
    assert sorted(os.listdir(archive)) == ["step-10", "step-10.verified", "step-20"]
    shutil.rmtree(archive / "step-20")
    done = run_recipe("operations.md", "rsync", paths, programs)
    assert "step-20: intact" in done.stdout and "step-10" not in done.stdout, done.stderr
    assert "not archived" not in done.stdout and (archive / "step-20.verified").exists()
