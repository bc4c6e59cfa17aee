"""Help and reference are generated from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.config import load_config
from torchtitan_like.config.document import help_text, markdown
from torchtitan_like.config.fields import all_settings


def test_docs_are_up_to_date(repo_root: Path) -> None:
    """If this fails: python -m torchtitan_like.config.document > docs/reference/config.md"""
    assert (repo_root / "docs/reference/config.md").read_text() == markdown()


def test_every_setting_has_a_short_description() -> None:
    for setting in all_settings():
        description = setting.field.description or ""
        assert description.endswith("."), setting.key
        assert len(description) <= 260, setting.key


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(["--job.config_file", "x.toml", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: titan train X.toml") and text.endswith(help_text())
    missing = [
        s.key for s in all_settings() if not s.is_named_tables and f"  --{s.key}" not in text
    ]
    assert missing == []
    assert "one of " in text and "default: 0.0008." in text
