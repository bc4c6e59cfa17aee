"""Registrations, names and sections of user code, and the errors of each kind of extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.extensions import extensions_removed
from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError, JobConfig, dump_toml, load_config
from torchtitan_like.config.document import settings_help
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.toml_text import dump_toml as dump
from torchtitan_like.extensions.registering import PARAMETERS, SETTINGS, built_in_names
from torchtitan_like.stored_config import load_trusted
from torchtitan_like.util.registry import KINDS

HEAD = """
import torch
from pydantic import BaseModel, field_validator
from torch.nn import functional as F
from torchtitan_like.extensions import Section, field, register
"""
OPTIMIZER = """
@register("optimizer", "Own")
class Own(torch.optim.Optimizer):
    def __init__(self, groups, settings):
        super().__init__(groups, {})
        self.prepare()

    def prepare(self):
        pass

    def step(self, closure=None):
        pass
"""
SECTION = """
@register("section", "own")
class OwnSection(BaseModel):
    rate: float = 0.5
    words: list[str] = []
    unset: int | None = None
    free: int = field(1, affects="nothing")
    model_config = {"extra": "allow"}

    @field_validator("rate")
    @classmethod
    def check(cls, rate):
        if rate == 13:
            raise ValueError("13 is unlucky")
        return rate
"""
STEPS = ["--training.steps", "1000"]


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    with extensions_removed():
        yield


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., JobConfig]:
    """Return a function that loads a configuration with a file of user code."""

    def load_with(code: str, *arguments: str) -> JobConfig:
        file = tmp_path / "own.py"
        file.write_text(HEAD + code)
        argv = [*STEPS, "--experimental.custom_import", str(file), *arguments]
        return load_checked(argv, 1, training=True, device_type="cpu")[0]

    return load_with


def problems_of(load: Callable[..., JobConfig], code: str, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(code, *arguments)
    return [str(problem) for problem in error.value.problems]


def test_the_tables_have_every_kind() -> None:
    assert SETTINGS.keys() == PARAMETERS.keys() == set(KINDS) - {"section"}
    assert all(isinstance(built_in_names(kind), tuple) for kind in KINDS)


LOAD = "--optimizer.name Own".split()
USE_SOURCE = "--data.sources.a.path x --data.sources.a.format own".split()
SOURCE = """
@register("data_source", "own")
class Own:
    fingerprint = "1"
    def __init__(self, path, settings): pass
    def __len__(self): return 5
    def __getitem__(self, index): {body}
"""
LOSS = """
@register("loss", "own")
def own(logits, labels, settings): {body}
"""
# Name -> code, arguments, and words of the only problem.
BROKEN: dict[str, tuple[str, list[str], list[str]]] = {
    "unknown name": (OPTIMIZER, ["--optimizer.name", "Ovn"],
                     ["optimizer.name", '"Muon", "Own", or a registered optimizer', 'did you mean "Own"?']),
    "unknown section": (SECTION, ["--owm.rate", "1"], ["owm: expected a known section", 'did you mean "own"?']),
    "unknown key": (SECTION, ["--own.ratte", "1"], ["own.ratte = ", 'did you mean "own.rate"?']),
    "wrong type": (SECTION, ["--own.rate", "fast"], ["own.rate", "expected a number"]),
    "own validator": (SECTION, ["--own.rate", "13"], ["own.rate = 13.0", "13 is unlucky"]),
    "raises at import": ("raise KeyError('absent')", [], ["own.py", "KeyError: 'absent', at line 6 of"]),
    "unknown kind": ("register('optimiser', 'x')(len)", [],
                     ["registers the kind 'optimiser'", 'did you mean "optimizer"?']),
    "malformed name": ("register('section', 'My Section')(BaseModel)", [], ["'My Section'", "[a-z][a-z0-9_]*"]),
    "built-in name": (OPTIMIZER.replace("Own", "AdamW"), [], ["'AdamW', which torchtitan_like has"]),
    "built-in section": (SECTION.replace('"own"', '"training"'), [], ["'training', which torchtitan_like has"]),
    "duplicate": (OPTIMIZER + OPTIMIZER, [],
                  ["two registrations of the optimizer 'Own'", "own.py:7 and", "own.py:19. Expected one"]),
    "wrong signature": ("@register('loss', 'own')\ndef own(logits, labels): pass", [],
                        ["the loss 'own'", "has the parameters (logits, labels)", "own(logits, labels, settings)"]),
    "no function": ("register('loss', 'own')(3)", [], ["the loss 'own'", "is 3. Expected a function"]),
    "no section class": ("register('section', 'own')(dict)", [], ["subclass of pydantic.BaseModel"]),
    "section without default": ("@register('section', 'own')\nclass S(BaseModel):\n    x: int", [],
                                ["own.x has no default"]),
    "section with another type": ("@register('section', 'own')\nclass S(BaseModel):\n    x: set = set()", [],
                                  ["own.x is of type <class 'set'>"]),
    "source raises": (SOURCE.format(body="return ''").replace("pass", "{}[0]"), USE_SOURCE,
                      ["data.sources.a.format", "cannot be opened: KeyError: 0, at line 10 of"]),
    "source without documents": (SOURCE.format(body="return ''").replace("5", "0"), USE_SOURCE,
                                 ["data.sources.a.format", "expected at least one document"]),
    "source without fingerprint": (SOURCE.format(body="return ''").replace("fingerprint", "print"), USE_SOURCE,
                                   ["has the fingerprint None"]),
    "source without length": (SOURCE.format(body="return ''").replace("__len__", "size"), USE_SOURCE,
                              ["has no __len__"]),
    "compiled loss": (LOSS.format(body="return logits.sum(-1)"),
                      ["--loss.name", "own", "--compile.enable", "--compile.backend", "aot_eager",
                       "--parallelism.data_parallel_impl", "simple_fsdp"],
                      ["loss.name", "whose graph contains the loss"]),
    "early step": (OPTIMIZER, [*LOAD, "--optimizer.early_step_in_backward"],
                   ["early_step_in_backward", "false with a registered optimizer"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_extension_is_refused_before_training(
    load: Callable[..., JobConfig], case: str, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    code, arguments, words = BROKEN[case]
    (problem,) = problems_of(load, code, *arguments)
    for word in words:
        assert word in problem, problem


def test_a_section_is_strict_and_part_of_all_settings(load: Callable[..., JobConfig]) -> None:
    config = load(SECTION, "--own.rate", "0.25", "--own.words", "a,b")
    assert config.extra_sections["own"].model_dump() == {
        "rate": 0.25, "words": ["a", "b"], "unset": None, "free": 1
    }  # fmt: skip
    settings = {setting.key: setting.affects for setting in all_settings()}
    assert (settings["own.rate"], settings["own.free"]) == ("numerics", "nothing")
    assert "--own.rate" in settings_help("own") and "[own]" in dump_toml(config)
    with pytest.raises(ConfigError):
        load_config(["--own.extra", "1"])  # although the class allows it


def test_a_registered_name_is_in_the_help(load: Callable[..., JobConfig]) -> None:
    load(OPTIMIZER)
    assert '"Muon", "Own", or a registered optimizer' in settings_help("optimizer.name")


def test_a_stored_config_needs_the_module_of_the_command(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    stored = tmp_path / "config.toml"
    stored.write_text(dump(load(OPTIMIZER + SECTION, *LOAD)))
    module = str(tmp_path / "own.py")
    assert load_trusted(stored, module).optimizer.name == "Own"
    with extensions_removed():
        from torchtitan_like.util import registry

        for table in registry._tables.values():
            table.clear()
        with pytest.raises(ConfigError) as error:
            load_trusted(stored, "")
    keys = [problem.key for problem in error.value.problems]
    assert keys == ["optimizer.name", "own"]
    remedy = f"if you trust it: --experimental.custom_import {module}"
    assert all(remedy in str(problem) for problem in error.value.problems)


def test_settings_of_the_schedule_warn_if_another_ignores_them(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    code = "@register('lr_schedule', 'own')\ndef own(step, total_steps, settings): return 1.0"
    load(code)
    argv = [*STEPS, "--lr_scheduler.name", "own", "--lr_scheduler.warmup_steps", "5000"]
    argv += ["--experimental.custom_import", str(tmp_path / "own.py")]
    assert load_checked(argv, 1, training=True)[1] == []  # both are on the command line
    file = tmp_path / "base.toml"
    file.write_text("[lr_scheduler]\nname = 'own'\n")
    argv = [*STEPS, "--job.config_file", str(file), "--lr_scheduler.warmup_steps", "5000"]
    argv += ["--experimental.custom_import", str(tmp_path / "own.py")]
    (warning,) = load_checked(argv, 1, training=True)[1]
    assert 'it needs lr_scheduler.name = "wsd"' in warning.expected
