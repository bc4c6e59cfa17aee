"""scripts/logbook_add.py: an entry holds where the run was, and nothing that was written before is lost."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from scripts import logbook_add


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """At step 61,000 of its second attempt."""
    for number in (1, 2):
        folder = tmp_path / f"run/attempts/{number}/environment"
        folder.mkdir(parents=True)
        (folder / "git.txt").write_text(f"checkout /src\ncommit {number}abc\n3 changed or untracked files\n M x.py\n")
    row = {"step": 61_000, "loss": 2.34567, "n_tokens_seen": 64_000_000}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 61')
    return tmp_path / "run"


def test_entries_are_added_at_the_end(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = tmp_path / "logbook.md"
    assert logbook_add.main([str(book), "loss spike", "--run", str(run), "--author", "Anna"]) == 0
    first = book.read_text()
    template = logbook_add.TEMPLATE.read_text()
    assert first.startswith(template)
    assert re.fullmatch(
        r"\n## \d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}, Anna\n\n"
        rf"\*step 61,000, loss 2\.3457, 64,000,000 tokens; attempt 2 of {re.escape(str(run))}; commit 2abc\*\n\nloss spike\n",
        first.removeprefix(template),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("went back\nto 60,500\n"))
    assert logbook_add.main([str(book)]) == 0
    added = book.read_text().removeprefix(first)
    assert re.fullmatch(r"\n## [^\n]+\n\nwent back\nto 60,500\n", added)


def test_a_dry_run_writes_nothing(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logbook_add.main([str(tmp_path / "logbook.md"), "x", "--run", str(run), "--dry-run"]) == 0
    assert "step 61,000" in capsys.readouterr().out and not (tmp_path / "logbook.md").exists()


@pytest.mark.parametrize(("words", "said"), [([" "], "is empty"), (["x", "--run", "nowhere"], "holds no environment")])
def test_what_cannot_be_noted(tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert logbook_add.main([str(tmp_path / "logbook.md"), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "logbook.md").exists()
