"""Build the documentation site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTERNAL = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+"
)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site into ``folder``, with warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        target = site / name if name.name == "index" else site / name / "index"
        assert target.with_suffix(".html").exists(), page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = {
        match
        for page in site.rglob("*.html")
        for match in EXTERNAL.findall(page.read_text("utf-8"))
    }
    assert loaded == set()
    assert not [
        sheet
        for sheet in site.rglob("*.css")
        if re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text("utf-8"))
    ]


def test_the_pattern_detects_a_page_that_loads_a_font() -> None:
    page = '<link rel="stylesheet" href="https://fonts.example.org/css?family=Roboto">'
    assert EXTERNAL.search(page) is not None
