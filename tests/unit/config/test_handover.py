"""The configuration that a launcher hands to its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.extensions import forgotten
from torchtitan_like.check import load_checked, load_with_files
from torchtitan_like.config import ConfigError, dump_toml, handover, load_config
from torchtitan_like.config.loader import CommandLine
from torchtitan_like.util.bundle import TRAIN_CONFIGS


def hand_over(*words: str, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Return the command line of a rank whose launcher has loaded these settings."""
    config = load_config(words)
    monkeypatch.setenv(
        handover.VARIABLE, handover.encode(config, config.notices)[handover.VARIABLE]
    )
    command_line = handover.take_command_line([])
    assert handover.VARIABLE not in os.environ
    return command_line


@pytest.mark.parametrize("file", sorted(TRAIN_CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_a_rank_has_the_configuration_of_its_launcher(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--job.config_file", str(file), "--training.steps", "7", "--model.args.rope_theta=1e4"]
    config = load_config(words)
    again = hand_over(*words, monkeypatch=monkeypatch).load()
    assert again == config and dump_toml(again) == dump_toml(config)
    assert again._origins == config._origins and again._layers == config._layers


def test_a_rank_gets_the_warnings_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--training.batch_size", "2"]
    config = load_config(words)
    assert hand_over(*words, monkeypatch=monkeypatch).load().notices == config.notices != ()


def test_a_rank_checks_its_device_and_not_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--training.dataset_path", "/nowhere", "--training.enable_cpu_offload"]
    problems = load_with_files(words, training=True).problems
    assert "training.dataset_path" in [problem.key for problem in problems]
    command_line = hand_over(*words, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError) as caught:
        load_checked(command_line, 1, training=True, device_type="cpu")
    assert {problem.key for problem in caught.value.problems} == {"training.enable_cpu_offload"}


def test_free_values_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"--model.args.x=[{2**80}, inf, -inf, 2.0, 2, true, 'é\"']", "--model.args.y=None"]
    args = hand_over(*words, monkeypatch=monkeypatch).load().model.args
    assert repr(args) == repr(load_config(words).model.args)


@pytest.mark.parametrize(("words", "limit"), [([], 100), (["--model.args.x=2026-11-28"], 120_000)])
def test_a_configuration_that_cannot_be_handed_over_is_read_by_each_rank(
    words: list[str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MAX_LENGTH", limit)
    assert not hand_over(*words, monkeypatch=monkeypatch).is_checked


USER_CODE = """
from torchtitan_like.extensions import Section, field, register_section

@register_section("own")
class Own(Section):
    rate: float = field(0.5, "A rate.")
"""


def test_a_rank_imports_the_module_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then only the folders of the run are known."""
    (tmp_path / "own.py").write_text(USER_CODE)
    words = [f"--experimental.custom_import={tmp_path / 'own.py'}", "--job.dump_folder=mine"]
    words += ["--own.rate=0.25"]
    with forgotten():
        launcher = CommandLine(words)
        assert launcher.import_extensions() == []
        text = handover.encode(launcher.load(), ())[handover.VARIABLE]
    monkeypatch.setenv(handover.VARIABLE, text)
    with forgotten():
        command_line = handover.take_command_line([])
        with pytest.raises(ConfigError) as caught:
            command_line.load()
        assert caught.value.partial is not None
        assert caught.value.partial.job.dump_folder == "mine"
        assert command_line.import_extensions() == []
        assert command_line.load().value_of("own.rate") == 0.25
    (tmp_path / "own.py").write_text("raise KeyError('absent')")
    with forgotten():
        monkeypatch.setenv(handover.VARIABLE, text)
        with pytest.raises(ConfigError) as refused:
            load_checked(handover.take_command_line([]), 1, training=True, device_type="cpu")
    (problem,) = refused.value.problems
    assert problem.origin == "command line" and "'absent'" in problem.expected
