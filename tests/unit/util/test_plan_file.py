"""Plan files: what they are compared with, and files that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.config import dump_toml
from torchtitan_like.util.plan_file import (
    Measured,
    PlanFile,
    beside,
    describe_differences,
    deviations,
    differences,
    event_fields,
    read_plan,
    settings_of,
    write_plan,
)
from torchtitan_like.util.run_directory import parse_config

DEBUG = Path(__file__).resolve().parents[3] / "train_configs/debug_model.toml"


def settings(*words: str, world_size: int = 2) -> dict[str, Any]:
    config, _ = load_checked(["--job.config_file", str(DEBUG), *words], None, training=False)
    return settings_of(parse_config(dump_toml(config)), world_size)


MODULES = {"norm": {"weights": 4, "state": 8}}
PLAN = PlanFile(settings(), "h100-80g", "default", 40.0, 35.0, 42.0, 2.0, 25.0, MODULES)


def test_a_plan_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    for plan in (PLAN, replace(PLAN, step_seconds=None, error_percent=None)):
        write_plan(tmp_path / "x.plan.json", plan)
        assert read_plan(tmp_path / "x.plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version"),
        ({"reserved": "many"}, "reserved"),
        ({"reserved": 0.0}, "reserved"),
        ({"step_seconds": -1.0}, "step_seconds"),
        ({"settings": []}, "settings"),
        ({"other": 1}, "other"),
        ({"fullest": None}, "fullest"),
        ({"modules": []}, "modules"),
        ({"modules": {"norm": {"weights": "many"}}}, "modules.norm"),
    ],
)
def test_other_files_are_no_plans(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.plan.json"
    write_plan(path, PLAN)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"is no plan file: .*{message}"):
        read_plan(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "1"])
def test_text_that_is_no_object_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.plan.json").write_text(text)
    with pytest.raises(ValueError, match="is no plan file"):
        read_plan(tmp_path / "x.plan.json")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--parallelism.tensor_parallel_degree=2",), "parallelism.tensor_parallel_degree"),
        (("--training.local_batch_size=2",), "training.local_batch_size"),
        (("--model.args.n_layers=7",), "model.args.n_layers"),
        (("--activation_checkpoint.mode=full",), "activation_checkpoint.mode"),
        (("--compile.enable",), "compile.enable"),
        (("--loss.chunk_mib=0",), "loss.chunk_mib"),
        (("--model.converters=quantize.linear.float8",), "model.converters"),
        (("--optimizer.name=Muon",), "optimizer.name"),
        (("--ema.enable",), "ema.enable"),
        (("--optimizer.state_dtype", "bfloat16"), "optimizer.state_dtype"),
    ],
)
def test_settings_that_change_memory_or_time_are_compared(words: tuple[str, ...], key: str) -> None:
    found = differences(PLAN, settings(*words))
    assert [text.partition(":")[0] for text in found] == [key]


@pytest.mark.parametrize(
    "words",
    [
        ("--training.steps=7",),
        ("--optimizer.lr=0.1",),
        ("--job.dump_folder=elsewhere",),
        ("--metrics.log_freq=3",),
        ("--model.hf_assets_path=elsewhere",),
    ],
)
def test_other_settings_are_not_compared(words: tuple[str, ...]) -> None:
    assert differences(PLAN, settings(*words)) == []


def test_the_number_of_ranks_is_compared() -> None:
    assert differences(PLAN, settings(world_size=4)) == ["world_size: planned 2, run with 4"]


def test_a_plan_of_another_configuration_is_said_to_be_one() -> None:
    text = describe_differences(
        Path("x.plan.json"), [f"key{n}: planned 1, run with 2" for n in range(7)]
    )
    assert text.startswith("The plan x.plan.json is of another configuration (key0: planned 1")
    assert "key4" in text and "key5" not in text and "and 2 more" in text


def test_deviations() -> None:
    memory, time = deviations(PLAN, Measured(44.0, 1.9))
    assert memory.share == pytest.approx(0.1) and time.share == pytest.approx(-0.05)
    assert str(memory) == "reserved memory: planned 40 GiB, measured 44 GiB (+10.0 %)"
    assert deviations(PLAN, Measured()) == []
    assert [each.name for each in deviations(PLAN, Measured(None, 2.0))] == ["step time"]
    without_time = replace(PLAN, step_seconds=None)
    assert [each.name for each in deviations(without_time, Measured(1.0, 2.0))] == [
        "reserved memory"
    ]


def test_the_event_has_both_sides() -> None:
    fields = event_fields(PLAN, Measured(44.0, 1.9))
    assert fields["off_percent"] == {"reserved memory": 10.0, "step time": -5.0}
    assert (fields["planned_step_s"], fields["step_s"], fields["reserved_gib"]) == (2.0, 1.9, 44.0)


def test_the_plan_is_next_to_the_file() -> None:
    assert beside(Path("a/llama3_8b.toml")) == Path("a/llama3_8b.plan.json")
