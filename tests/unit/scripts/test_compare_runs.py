"""scripts/compare_runs.py names the first step at which two runs part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.compare_runs import main


def write(folder: Path, num_steps: int, **changed: dict[int, Any]) -> str:
    """A run whose rows are those of every other one but for ``changed``: key -> step -> value."""
    folder.mkdir()
    rows = []
    for step in range(1, num_steps + 1):
        row = {
            "step": step, "n_tokens_seen": 8 * step, "num_valid_tokens": 7, "lr": 1e-3, "skipped": False,
            "data_digest": f"{step:016x}", "data_digest_chain": f"{step * 3:016x}", "loss": 4.0 / step, "grad_norm": 1.0,
        }  # fmt: skip
        rows.append(row | {key: values[step] for key, values in changed.items() if step in values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "a", 5), write(tmp_path / "b", 7)]) == 0
    told = capsys.readouterr().out
    assert "5 steps in both, 1 to 5" in told and "2 steps only in B" in told and "differs" not in told
    assert "max_loss           in no row of both" in told


def test_the_first_difference_of_each_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"data_digest": {4: "ff", 5: "fe"}, "loss": {3: 4.0 / 3 * 1.5, 5: 0.8 * 1.25}}
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, **changed)]
    assert main(runs) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert "differs from step 4 on: 0000000000000004 and ff" in lines["data_digest"]
    assert "differs from step 3 on: " in lines["loss"] and lines["loss"].endswith(
        "largest relative difference 5.00e-01"
    )
    assert lines["grad_norm"].endswith("equal")
    assert main([*runs, "--data-only"]) == 1
    assert "loss" not in capsys.readouterr().out.replace("max_loss", "")


def test_only_the_loss_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, loss={2: float("nan")})]
    assert main([*runs, "--data-only"]) == 0
    assert main(runs) == 1
    assert "differs from step 2 on: 2.0 and nan" in capsys.readouterr().out
    assert main([runs[1], runs[1]]) == 0


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "a", 5), str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert main([str(tmp_path / "empty"), str(tmp_path / "a")]) == 2
    assert "has no step" in capsys.readouterr().err
