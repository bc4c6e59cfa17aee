"""Help and reference are generated from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.config import load_config
from torchtitan_like.config.document import COMMON, common_help, markdown, settings_help
from torchtitan_like.config.fields import all_settings, find, names_at


def test_docs_are_up_to_date(repo_root: Path) -> None:
    """If this fails: python -m torchtitan_like.config.document > docs/reference/config.md"""
    assert (repo_root / "docs/reference/config.md").read_text() == markdown()


def test_every_setting_has_a_short_description() -> None:
    for setting in all_settings():
        description = setting.field.description or ""
        assert description.endswith("."), setting.key
        assert len(description) <= 260, setting.key


def test_help_has_the_common_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(["--job.config_file", "x.toml", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: titan train X.toml") and text.endswith(f"{common_help()}\n")
    shown = [key for key in COMMON if f"\n  --{key}  " in text]
    assert shown == list(COMMON) and len(COMMON) == 20
    assert max(map(len, text.splitlines())) <= 100


def test_every_setting_is_explained_by_its_section_its_key_and_its_last_part() -> None:
    by_section = {name: settings_help(name) for name in names_at(())}
    for setting in all_settings():
        if not setting.is_named_tables:
            texts = [settings_help(f"--{setting.key.replace('_', '-')}")]
            if find((setting.path[-1],)) is None:  # not the name of a section
                texts.append(settings_help(setting.path[-1]))
            for text in (by_section[setting.path[0]], *texts):
                assert f"  --{setting.key}" in text
    assert "default: 0.0008." in settings_help("optimizer.lr")
    assert "one of " in settings_help("parallelism.pipeline_parallel_schedule")


def test_a_name_without_setting_has_no_help() -> None:
    assert settings_help("training.step") == settings_help("ep") == ""
