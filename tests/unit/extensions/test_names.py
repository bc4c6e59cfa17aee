"""Names and sections of user code, and the errors of each kind of extension."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.extensions import forgotten
from torchtitan_like.check import check_config, load_checked
from torchtitan_like.config import ConfigError, JobConfig, dump_toml, load_config
from torchtitan_like.config.document import settings_help
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.toml_text import dump_toml as dump
from torchtitan_like.extensions.user_code import PARAMETERS
from torchtitan_like.stored_config import load_trusted

HEAD = """
import torch
from pydantic import BaseModel, field_validator
from torchtitan_like.extensions import Section, field, register_section
"""
OPTIMIZER = """
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
@register_section("own")
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
def _forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    with forgotten("own", "own_module"):
        yield


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., JobConfig]:
    """Return a function that loads a configuration with `own_module`, a module of user code."""

    def load_with(code: str, *arguments: str) -> JobConfig:
        (tmp_path / "own_module.py").write_text(HEAD + code)
        imported = ["--experimental.custom_import", "own_module"] * ("register_section" in code)
        argv = [*STEPS, *imported, *arguments]
        return load_checked(argv, 1, training=True, device_type="cpu")[0]

    return load_with


def problems_of(load: Callable[..., JobConfig], code: str, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(code, *arguments)
    return [str(problem) for problem in error.value.problems]


def test_each_kind_has_a_setting() -> None:
    kinds = {setting.name_of.kind for setting in all_settings() if setting.name_of is not None}
    assert kinds == PARAMETERS.keys()


LOAD = "--optimizer.name own_module:Own".split()
USE_LOSS = "--loss.name own_module:own".split()
USE_SOURCE = "--data.sources.a.path x --data.sources.a.format own_module:Own".split()
SOURCE = """
class Own:
    fingerprint = "1"
    def __init__(self, path, settings): pass
    def __len__(self): return 5
    def __getitem__(self, index): {body}
"""
LOSS = """
def own(logits, labels, settings): {body}
"""
# Name -> code, arguments, and words of the only problem.
BROKEN: dict[str, tuple[str, list[str], list[str]]] = {
    "no name": (OPTIMIZER, ["--optimizer.name", "Muom"],
                ["optimizer.name", '"Muon", or your own optimizer as "module:name"', 'did you mean "Muon"?']),
    "a file": (OPTIMIZER, ["--optimizer.name", "./own_module.py:Own"], ["optimizer.name", '"module:name"']),
    "unknown name": (OPTIMIZER, ["--optimizer.name", "own_module:Ovn"],
                     ["optimizer.name", "own_module has no Ovn", 'did you mean "own_module:Own"?']),
    "unknown module": ("", ["--optimizer.name", "own_modul:Own"],
                       ["No module named 'own_modul'", "the module to PYTHONPATH"]),
    "module fails": ("raise KeyError('absent')", [*LOAD, *USE_LOSS, *USE_SOURCE],
                     ["optimizer.name", "KeyError: 'absent', at line 5 of"]),
    "function of another module": ("from shutil import rmtree as Own", USE_SOURCE,
                                   ["data.sources.a.format", "is defined in shutil. Expected"]),
    "unknown section": (SECTION, ["--owm.rate", "1"], ["owm: expected a known section", 'did you mean "own"?']),
    "unknown key": (SECTION, ["--own.ratte", "1"], ["own.ratte = ", 'did you mean "own.rate"?']),
    "wrong type": (SECTION, ["--own.rate", "fast"], ["own.rate", "expected a number"]),
    "own validator": (SECTION, ["--own.rate", "13"], ["own.rate = 13.0", "13 is unlucky"]),
    "raises at import": ("register_section('own')\nraise KeyError('absent')", LOAD,
                         ["custom_import", "own_module", "KeyError: 'absent', at line 6 of"]),
    "malformed name": ("register_section('My Section')(BaseModel)", [], ["'My Section'", "[a-z][a-z0-9_]*"]),
    "built-in section": (SECTION.replace('"own"', '"training"'), [], ["'training', which torchtitan_like has"]),
    "duplicate": (SECTION + SECTION, [],
                  ["two registrations of the config section 'own'", "own_module.py:6 and", "own_module.py:21. Expected one"]),
    "wrong signature": ("def own(logits, labels): pass", USE_LOSS,
                        ["the loss own_module:own", "own(logits, labels, settings)", "too many positional"]),
    "no function": ("own = 3", USE_LOSS, ["the loss own_module:own is 3. Expected a function"]),
    "no section class": ("register_section('own')(dict)", [], ["subclass of pydantic.BaseModel"]),
    "section without default": ("@register_section('own')\nclass S(BaseModel):\n    x: int", [],
                                ["own.x has no default"]),
    "section with another type": ("@register_section('own')\nclass S(BaseModel):\n    x: set = set()", [],
                                  ["own.x is of type <class 'set'>"]),
    "source raises": (SOURCE.format(body="return ''").replace("pass", "{}[0]"), USE_SOURCE,
                      ["data.sources.a.format", "cannot be opened: KeyError: 0, at line 8 of"]),
    "source without documents": (SOURCE.format(body="return ''").replace("5", "0"), USE_SOURCE,
                                 ["data.sources.a.format", "expected at least one document"]),
    "source without fingerprint": (SOURCE.format(body="return ''").replace("fingerprint", "print"), USE_SOURCE,
                                   ["has the fingerprint None"]),
    "source without length": (SOURCE.format(body="return ''").replace("__len__", "size"), USE_SOURCE,
                              ["has no __len__"]),
    "compiled loss": (LOSS.format(body="return logits.sum(-1)"),
                      [*USE_LOSS, "--compile.enable", "--compile.backend", "aot_eager",
                       "--parallelism.data_parallel_impl", "simple_fsdp"],
                      ["loss.name", "whose graph contains the loss"]),
    "early step": (OPTIMIZER, [*LOAD, "--optimizer.early_step_in_backward"],
                   ["early_step_in_backward", "false with your own optimizer"]),
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


def test_a_check_needs_no_torch_for_code_that_imports_it(
    load: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="import of torch halted"):
        load(OPTIMIZER, *LOAD)
    (warning,) = check_config(load_config(LOAD), 1, training=False)
    assert warning.severity == "warning" and "import of torch halted" in str(warning)


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


def test_a_stored_config_needs_the_module_of_the_command(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    stored = tmp_path / "config.toml"
    with forgotten("own_module"):
        stored.write_text(dump(load(OPTIMIZER + SECTION, *LOAD)))
    with pytest.raises(ConfigError) as error:
        load_trusted(stored, "")
    keys = {problem.key for problem in error.value.problems}
    assert keys == {"optimizer.name", "own"} and "own_module" not in sys.modules
    remedy = "if you trust it: --experimental.custom_import own_module"
    assert all(remedy in str(problem) for problem in error.value.problems)
    assert load_trusted(stored, "own_module").optimizer.name == "own_module:Own"
    with pytest.raises(ConfigError, match="optimizer.name"):
        load_trusted(stored, "json")
    config = load_trusted(stored, "json", ["--optimizer.name", "elsewhere:Own"])
    assert config.optimizer.name == "elsewhere:Own"  # the command's own name


def test_settings_of_the_schedule_warn_if_another_ignores_them(
    load: Callable[..., JobConfig], tmp_path: Path
) -> None:
    load("def own(step, total_steps, settings): return 1.0")
    argv = [*STEPS, "--lr_scheduler.name", "own_module:own", "--lr_scheduler.warmup_steps", "5000"]
    assert load_checked(argv, 1, training=True)[1] == []  # both are on the command line
    file = tmp_path / "base.toml"
    file.write_text("[lr_scheduler]\nname = 'own_module:own'\n")
    argv = [*STEPS, "--job.config_file", str(file), "--lr_scheduler.warmup_steps", "5000"]
    (warning,) = load_checked(argv, 1, training=True)[1]
    assert 'it needs lr_scheduler.name = "wsd"' in warning.expected
