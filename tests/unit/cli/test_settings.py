"""The config file of `titan train` and `titan check`: a path, or the name of a bundled config."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.cli.common import with_config
from torchtitan_like.util.bundle import TRAIN_CONFIGS

BUNDLED = str(TRAIN_CONFIGS / "debug_model.toml")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("debug_model.toml", ["--a.b", "1"], ["--job.config_file", BUNDLED, "--a.b", "1"]),
        (None, ["--job.config_file", "debug_model.toml"], ["--job.config_file", BUNDLED]),
        (None, ["--job.config-file=debug_model.toml"], [f"--job.config-file={BUNDLED}"]),
    ],
)
def test_the_name_of_a_bundled_config_becomes_its_path(
    config: str | None, settings: list[str], expected: list[str]
) -> None:
    log: list[str] = []
    assert with_config(config, settings, log.append) == expected
    assert log == [f"Using the bundled configuration {BUNDLED}"]


@pytest.mark.parametrize("config", ["nowhere.toml", "folder/debug_model.toml", "./my.toml"])
def test_other_paths_do_not_change(config: str) -> None:
    log: list[str] = []
    assert with_config(config, [], log.append) == ["--job.config_file", config]
    assert log == []


def test_a_file_in_the_working_folder_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "debug_model.toml").write_text("")
    assert with_config("debug_model.toml", [], print)[1] == "debug_model.toml"
