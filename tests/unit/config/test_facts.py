"""Every setting declares its facts: effect on checkpoints, requirements, agreement of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from torchtitan_like.check.rules.no_effect_rules import find_idle_settings
from torchtitan_like.config import load_config
from torchtitan_like.config.base import (
    Affected,
    Facts,
    Section,
    above,
    converter,
    enabled,
    field,
    one_of,
)
from torchtitan_like.config.fields import Setting, all_settings, settings_of
from torchtitan_like.config.schema import JobConfig

# New settings of these sections may change on resume without a warning. A new setting of any other
# section must declare what it affects. Otherwise a change is refused as a change of its section.
SECTIONS_WITHOUT_STATE = {
    "ActivationCheckpoint", "Checkpoint", "Comm", "Compile", "Data", "DataLoader", "DataSource", "FaultTolerance",
    "Job", "Loss", "MemoryEstimation", "Metrics", "Parallelism", "Profiling", "Resilience", "Validation",
}  # fmt: skip


def sections(section: type[Section] = JobConfig) -> Iterator[type[Section]]:
    for setting in settings_of(section):
        if setting.section is not None:
            yield setting.section
            yield from sections(setting.section)


def test_every_setting_declares_what_it_affects() -> None:
    for setting in all_settings():
        assert setting.affects in get_args(Affected), setting.key


def test_only_these_sections_affect_nothing_by_default() -> None:
    defaults = {section.__name__ for section in sections() if section.facts.affects == "nothing"}
    assert defaults == SECTIONS_WITHOUT_STATE


def test_a_setting_without_a_declared_state_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (seed, *_) = [setting for setting in all_settings() if setting.key == "debug.seed"]
    monkeypatch.setattr(Setting, "facts", Facts())
    with pytest.raises(LookupError, match="debug.seed does not declare what it affects"):
        _ = seed.affects


def test_needs_of_sections_precede_needs_of_the_setting() -> None:
    needs = {setting.key: list(map(str, setting.needs)) for setting in all_settings()}
    assert needs["validation.dataloader.prefetch_factor"] == [
        "validation.enable = true",
        "validation.dataloader.num_workers > 0",
    ]
    assert needs["training.dataloader.prefetch_factor"] == ["training.dataloader.num_workers > 0"]
    assert needs["validation.enable"] == []
    assert needs["checkpoint.keep_every"] == [
        "checkpoint.enable = true",
        "checkpoint.keep_latest_k > 0: nothing is deleted",
        "checkpoint.load_only = false: the run saves no checkpoints",
    ]


def test_the_first_unmet_need_is_reported() -> None:
    config = load_config("--checkpoint.keep_every 1000 --checkpoint.load_only".split())
    messages = {problem.key: problem.expected for problem in find_idle_settings(config)}
    assert messages["checkpoint.keep_every"].endswith("it needs checkpoint.enable = true")
    line = "--checkpoint.enable --checkpoint.keep_every 1000 --checkpoint.load_only"
    config = load_config(line.split())
    assert not list(find_idle_settings(config))  # the same layer sets both
    (problem,) = find_idle_settings(config, every_layer=True)
    assert problem.key == "checkpoint.keep_every"
    assert problem.expected.endswith(
        "it needs checkpoint.load_only = false: the run saves no checkpoints"
    )


def test_conditions_of_needs() -> None:
    config = JobConfig()
    assert str(enabled().in_section("compile")) == "compile.enable = true"
    assert str(above(1, "a.b", reason="why")).startswith("{key} > 1: why")
    assert str(one_of("mode", "x", "y").in_section("s")) == 's.mode = "x" or "y"'
    assert above(0, "n").is_met(1, config) and not above(0, "n").is_met(0, config)
    assert one_of("n", "x").is_met("x", config) and not one_of("n", "x").is_met("z", config)
    assert converter("c").is_met(["c"], config) and not converter("c").is_met([], config)


def test_a_field_without_a_default_is_required() -> None:
    class Table(Section):
        path: str = field(description="A path.", min_length=1)

    assert Table.model_fields["path"].is_required()
