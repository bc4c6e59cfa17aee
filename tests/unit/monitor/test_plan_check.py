"""A run is compared with its plan once, and a plan of another configuration never."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.monitor.plan_check import PlanCheck, find_plan
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.plan_file import PlanFile, read_plan, write_plan

SETTINGS = {"world_size": 2, "parallelism.tensor_parallel_degree": 2}
PLAN = PlanFile(SETTINGS, "h100-80g", "default", 40.0, 35.0, 42.0, 2.0, 25.0, {})


def rows(first: int, last: int, log_freq: int, *, gib: float, seconds: float) -> list[list[dict]]:
    """Return what `Metrics` passes to observers at each log step."""
    batches: list[list[dict]] = [[]]
    for step in range(first, last + 1):
        batches[-1].append({"step": step})
        if step == first or step % log_freq == 0:
            batches[-1][-1] |= {"memory_gib": gib, "step_s": seconds}
            batches.append([])
    return batches[:-1]


def observe(batches: list[list[dict]], **options: Any) -> list[dict]:
    events: list[dict] = []
    check = PlanCheck(
        options.pop("plan", PLAN),
        lambda kind, **fields: events.append({"event": kind, **fields}),
        measures_memory=options.pop("measures_memory", True),
    )
    for batch in batches:
        check.observe(batch)
    return events


def test_memory_and_time_are_compared_once() -> None:
    (event,) = observe(rows(1, 50, 10, gib=41.0, seconds=2.1))
    assert event["event"] == "plan" and event["step"] == 10
    assert event["off_percent"] == {"reserved memory": 2.5, "step time": 5.0}


@pytest.mark.parametrize(
    ("log_freq", "memory_step", "time_step"), [(1, 3, 10), (2, 4, 10), (7, 7, 14)]
)
def test_the_first_log_lines_after_enough_steps_count(
    log_freq: int, memory_step: int, time_step: int
) -> None:
    batches = rows(1, 40, log_freq, gib=0.0, seconds=0.0)
    for row in (row for batch in batches for row in batch if "step_s" in row):
        row |= {"memory_gib": 100.0 + row["step"], "step_s": 200.0 + row["step"]}
    (event,) = observe(batches)
    assert event["reserved_gib"] == 100 + memory_step
    assert event["step_s"] == 200 + time_step and event["step"] == time_step


def test_steps_are_counted_from_the_start_of_the_attempt() -> None:
    (event,) = observe(rows(101, 150, 5, gib=40.0, seconds=2.0))
    assert event["step"] == 110


def test_a_short_run_is_not_compared() -> None:
    assert observe(rows(1, 9, 1, gib=40.0, seconds=2.0)) == []


def test_memory_of_a_process_is_not_compared_with_a_gpu() -> None:
    (event,) = observe(rows(1, 20, 5, gib=1.0, seconds=2.0), measures_memory=False)
    assert event["reserved_gib"] is None and event["off_percent"] == {"step time": 0.0}


@pytest.mark.parametrize(
    ("seconds", "is_logged"), [(2.1, False), (2.19, False), (2.3, True), (1.7, True)]
)
def test_a_deviation_of_more_than_10_percent_is_logged(
    seconds: float, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        observe(rows(1, 20, 5, gib=40.0, seconds=seconds))
    assert ("not as planned" in caplog.text) == is_logged


# ---- which plan


def find(tmp_path: Path, settings: dict[str, Any] = SETTINGS) -> PlanFile | None:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    return find_plan(run, str(tmp_path / "x.toml"), settings, WriteFailures())


def test_no_plan_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find(tmp_path) is None and not caplog.records


def test_a_plan_next_to_the_file_is_copied_into_the_run(tmp_path: Path) -> None:
    write_plan(tmp_path / "x.plan.json", PLAN)
    assert find(tmp_path) == PLAN == read_plan(tmp_path / "run/plan.json")


def test_a_newer_plan_replaces_one_of_another_configuration(tmp_path: Path) -> None:
    other = replace(PLAN, settings={**SETTINGS, "parallelism.tensor_parallel_degree": 4})
    (tmp_path / "run").mkdir()
    write_plan(tmp_path / "run/plan.json", other)
    write_plan(tmp_path / "x.plan.json", PLAN)
    assert find(tmp_path) == PLAN == read_plan(tmp_path / "run/plan.json")


def test_a_plan_of_another_configuration_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_plan(tmp_path / "x.plan.json", PLAN)
    assert find(tmp_path, {**SETTINGS, "parallelism.tensor_parallel_degree": 4}) is None
    assert "x.plan.json is of another configuration" in caplog.text
    assert "parallelism.tensor_parallel_degree: planned 2, run with 4" in caplog.text
    assert not (tmp_path / "run/plan.json").exists()


def test_a_damaged_plan_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.plan.json").write_text("{")
    assert find(tmp_path) is None and "cannot be read" in caplog.text
