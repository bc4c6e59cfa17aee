"""`titan plan CONFIG`: the memory of a dry run, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.cli import main as titan
from torchtitan_like.util.plan_file import read_plan
from torchtitan_like.util.units import GIB

DEBUG = "debug_model.toml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "2"], "CONFIG is missing"),
        ([DEBUG, "--world-size", "2", "--gpu", "h99"], "there is no GPU 'h99'"),
        ([DEBUG, "--world-size", "2", "--cluster", "dgx"], "there is no cluster 'dgx'"),
        ([DEBUG, "--world-size", "2", "--rank-of-stage", "1"], "a pipeline rank from 0 to 0"),
        ([DEBUG, "--world-size", "2", "--rank-of-stage", "0", "-o", "x"], "a plan of all stages"),
    ],
)
def test_wrong_arguments_return_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert titan(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_impossible_layout_returns_78(capsys: pytest.CaptureFixture[str]) -> None:
    words = [DEBUG, "--world-size", "3", "--parallelism.tensor_parallel_degree", "2"]
    assert titan(["plan", *words]) == 78
    assert "3 ranks" in capsys.readouterr().err


def test_the_ledger_adds_up_and_the_exit_code_says_whether_it_fits(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.toml"
    shipped = Path(__file__).parents[3] / "torchtitan_like/plan/gpus/h100-80g.toml"
    tiny.write_text(shipped.read_text().replace("memory_gib = 79.1", "memory_gib = 2.1"))
    words = [DEBUG, "--world-size", "4", "--parallelism.pipeline_parallel_degree", "2", "--json"]
    command = [sys.executable, "-m", "torchtitan_like", "plan", *words, "--gpu", str(tiny)]
    command += ["-o", str(tmp_path / "debug.plan.json"), "--svg", str(tmp_path / "pictures")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "plan: 0 of 2 dry runs" in result.stderr and "plan: 2 of 2 dry runs" in result.stderr
    plan = json.loads(result.stdout)
    assert not plan["fits"]
    assert any("expandable segments" in note for note in plan["notes"])
    assert [(rank["rank"], rank["stage"]) for rank in plan["ranks"]] == [(0, 0), (2, 1)]
    for rank in plan["ranks"]:
        parts = rank["by_category"]
        assert sum(parts.values()) + rank["fragmentation"] == rank["reserved"]
        # AdamW's two states are as large as the fp32 weights, except for the step counts.
        assert 2 <= parts["optimizer"] / parts["parameters"] < 2.01
    assert "logits and loss" in plan["ranks"][1]["by_category"]
    time = plan["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"])
    # 8 samples of 256 tokens on 4 GPUs.
    assert time["tokens_per_second"] * time["seconds"] == pytest.approx(8 * 256 / 4)
    assert {"matrix products", "optimizer", "bubble"} <= time["parts"].keys()
    assert time["cluster"] == "default"
    assert any("unvalidated" in note for note in time["notes"])
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["memory.svg", "pipeline.svg", "streams.svg"]
    written = read_plan(tmp_path / "debug.plan.json")
    assert written.gpu == "tiny" and written.step_seconds == time["seconds"]
    assert written.reserved * GIB == plan["ranks"][0]["reserved"]
    assert written.fullest > written.reserved > written.active > 0
    assert written.settings["parallelism.pipeline_parallel_degree"] == 2
    assert written.settings["world_size"] == 4


def test_the_quick_estimate_needs_no_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3_8b.toml", "--world-size", "8", "--gpu", "h100-80g", "--quick"]
    assert titan(["plan", *words]) == 0
    assert capsys.readouterr().out == (
        "8,030,261,248 parameters x 18 bytes x 1.25 / 79.1 GiB = 2.13: at least 3 GPUs (NVIDIA H100 SXM, 80 GB)\n"
    )
