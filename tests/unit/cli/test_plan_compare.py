"""`titan run compare` with a plan: synthetic runs, and one that has planned itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runner import run_trainer
from tests.unit.report.run_folder import start_event, step_row, write_rows
from torchtitan_like.check import load_checked
from torchtitan_like.cli import main as titan
from torchtitan_like.config import dump_toml
from torchtitan_like.report.history import read_histories
from torchtitan_like.report.page import render_page
from torchtitan_like.report.summary import summarize
from torchtitan_like.util.jsonl import read_rows
from torchtitan_like.util.plan_file import PlanFile, read_plan, settings_of, write_plan
from torchtitan_like.util.run_directory import parse_config

DEBUG = Path(__file__).resolve().parents[3] / "train_configs/debug_model.toml"


MODULES = {"norm": {"weights": 2**20, "state": 2**21}}


def write_run(run: Path, *, gpus: list[str], gib: float = 41.0, seconds: float = 2.1) -> PlanFile:
    """Write a run of 20 steps on two ranks, and return a plan of its configuration."""
    config, _ = load_checked(["--job.config_file", str(DEBUG)], None, training=False)
    text = dump_toml(config)
    rows = [step_row(step, 1000.0 + step) for step in range(1, 21)]
    for row in rows[::3]:  # log lines at steps 1, 4, 7, ...
        row |= {"memory_gib": gib if row["step"] == 4 else 1.0, "step_s": seconds, "tps": 100.0}
    rows[0]["step_s"] = rows[3]["step_s"] = 99.0  # before step 10
    write_rows(run / "metrics.jsonl", rows)
    modules = {"event": "memory", "time": 995.0, "attempt": 1, "step": 1, "modules": MODULES}
    write_rows(run / "events.jsonl", [start_event(1, 990.0, num_ranks=2), modules])
    (run / "config.toml").write_text(text)
    facts = run / "attempts/1/environment/facts.json"
    facts.parent.mkdir(parents=True)
    facts.write_text(json.dumps({"gpus": gpus} if gpus else {}))
    settings = settings_of(parse_config(text), 2)
    return PlanFile(settings, "h100-80g", "default", 40.0, 35.0, 42.0, 2.0, 25.0, MODULES)


def compare(run: Path, *words: str, plan: str = "plan.json") -> int:
    return titan(["run", "compare", str(run), str(run / plan), *words])


def test_a_run_near_its_plan_returns_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", write_run(tmp_path, gpus=["NVIDIA H100"]))
    assert compare(tmp_path) == 0
    out = capsys.readouterr().out
    assert "reserved memory: planned 40 GiB, measured 41 GiB (+2.5 %)" in out
    assert "step time: planned 2 s, measured 2.1 s (+5.0 %)" in out


def test_a_run_off_its_plan_returns_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "p.json", write_run(tmp_path, gpus=["NVIDIA H100"], seconds=2.3))
    assert compare(tmp_path, "--json", plan="p.json") == 1
    fields = json.loads(capsys.readouterr().out)
    assert fields["off_percent"] == {"reserved memory": 2.5, "step time": 15.0}


@pytest.mark.parametrize("option", ["--data-only", "--environment"])
def test_options_of_two_runs_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, option) == 2
    assert "plan.json is a plan, which has neither data nor" in capsys.readouterr().err


def test_bytes_of_modules_are_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(write_run(tmp_path, gpus=[]), modules={"norm": {"weights": 3 * 2**20}})
    write_plan(tmp_path / "plan.json", plan)
    compare(tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["norm", "weights", "3.00", "1.00"] in rows
    assert ["norm", "state", "0.00", "2.00"] in rows


def test_the_memory_of_a_cpu_run_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan.json", write_run(tmp_path, gpus=[], gib=500.0))
    assert compare(tmp_path) == 0
    assert "Memory is not compared" in capsys.readouterr().out


def test_a_plan_of_another_configuration_returns_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_run(tmp_path, gpus=["NVIDIA H100"])
    write_plan(tmp_path / "plan.json", replace(plan, settings={**plan.settings, "world_size": 8}))
    assert compare(tmp_path) == 2
    captured = capsys.readouterr()
    assert "another configuration (world_size: planned 8, run with 2)" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("damage", ["no plan", "no run", "no attempt", "no time"])
def test_missing_parts_return_2(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = {
        "no plan": "--world-size 2 -o",
        "no run": "is not the folder of a run",
        "no attempt": "has no attempts",
        "no time": "no measurement to compare",
    }
    run = tmp_path / "run"
    if damage != "no run":
        run.mkdir()
        plan = write_run(run, gpus=[])
        if damage != "no plan":
            write_plan(run / "plan.json", plan)
    if damage == "no attempt":
        (run / "attempts/1").rename(run / "attempts/one")
        (run / "events.jsonl").unlink()
    if damage == "no time":
        write_rows(run / "metrics.jsonl", [step_row(step, 1000.0) for step in range(1, 9)])
    assert compare(run) == 2
    assert messages[damage] in capsys.readouterr().err


def test_the_report_shows_the_plan(tmp_path: Path) -> None:
    write_run(tmp_path, gpus=[])
    fields: dict[str, Any] = {"planned_reserved_gib": 40.0, "reserved_gib": None, "gpu": "h100-80g"}
    fields |= {"planned_step_s": 2.0, "step_s": 2.5, "event": "plan", "time": 1010.0, "step": 10}
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps({**fields, "attempt": 1}) + "\n")
    (history,) = read_histories([tmp_path], is_redacted=False)
    assert summarize(history)["plan"]["step_s"] == 2.5
    page = render_page([history], is_redacted=False)
    assert "Planned for h100-80g." in page and "<td>+25.0 %</td>" in page


def test_a_report_without_a_plan_has_no_section(tmp_path: Path) -> None:
    write_run(tmp_path, gpus=[])
    (history,) = read_histories([tmp_path], is_redacted=False)
    assert summarize(history)["plan"] is None
    assert 'id="plan"' not in render_page([history], is_redacted=False)


@pytest.mark.nightly
def test_a_run_compares_itself_with_the_plan_beside_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is in the run directory, the comparison in events.jsonl and in the log."""
    toml = tmp_path / "tiny.toml"
    toml.write_text(
        f'extends = "{DEBUG}"\n[training]\nsteps = 11\nlocal_batch_size = 1\n'
        "[model.args]\nn_layers = 1\n"
    )
    argv = ["--job.config_file", str(toml), f"--job.dump_folder={tmp_path / 'run'}"]
    config, _ = load_checked(argv, 1, training=False)
    settings = settings_of(parse_config(dump_toml(config)), 1)
    plan = PlanFile(settings, "h100-80g", "default", 4.0, 3.5, 4.2, 1e-6, 25.0, {})
    write_plan(tmp_path / "tiny.plan.json", plan)
    result = run_trainer([*argv, "--metrics.log_freq=1"], 1, tmp_path / "run")
    assert result.returncode == 0, result.stdout
    run = result.dump_folder
    (event,) = [row for row in read_rows(run / "events.jsonl") if row["event"] == "plan"]
    assert event["step"] == 10 and event["reserved_gib"] is None
    measured = {row["step"]: row["step_s"] for row in read_rows(run / "metrics.jsonl")}
    assert event["step_s"] == measured[10]
    assert "This run is not as planned for h100-80g: step time" in result.stdout
    assert read_plan(run / "plan.json") == plan
    assert compare(run) == 1
    assert "step time: planned 1e-06 s" in capsys.readouterr().out
