"""Rows of eval.jsonl, and errors before the model is loaded. tests/integration runs lm-eval."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.cli import main as titan
from torchtitan_like.inference import evaluation
from torchtitan_like.util.jsonl import read_rows

RESULTS: dict[str, Any] = {
    "results": {
        "words": {
            "alias": "words",
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
            "exact_match,strict": 1,
            "exact_match_stderr,strict": "N/A",
            "sample_len": 4,
        },
    },
    "n-samples": {"words": {"original": 9, "effective": 4}},
}


def test_each_metric_and_filter_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "version", lambda name: "0.4.9")
    rows = [{"step": 7, **row} for row in evaluation.rows_of(RESULTS)]
    first = {"step": 7, "task": "words", "metric": "acc", "filter": "none", "value": 0.25}
    second = {"metric": "exact_match", "filter": "strict", "value": 1.0, "stderr": None}
    common = {"num_samples": 4, "lm_eval": "0.4.9", "time": rows[0]["time"]}
    assert rows == [{**first, "stderr": 0.125, **common}, {**first, **second, **common}]
    evaluation.append_rows(tmp_path / "eval.jsonl", rows[:1])
    evaluation.append_rows(tmp_path / "eval.jsonl", rows[1:])
    assert read_rows(tmp_path / "eval.jsonl") == rows
    assert evaluation.table_of(rows).splitlines() == [
        "task   metric       filter  value   stderr  samples",
        "words  acc          none    0.2500  0.1250  4",
        "words  exact_match  strict  1.0000          4",
    ]


def test_results_are_written_next_to_those_of_the_run(tmp_path: Path) -> None:
    step = tmp_path / "run/checkpoint/step-3"
    step.mkdir(parents=True)
    with pytest.raises(evaluation.EvaluationError, match="is in no run directory.* with -o"):
        evaluation.output_file(step, None)
    (tmp_path / "run/attempts").mkdir()
    assert evaluation.output_file(step, None) == tmp_path / "run/eval.jsonl"
    assert evaluation.output_file(step, Path("other.jsonl")) == Path("other.jsonl")


def test_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert titan(["eval", str(tmp_path), "--tasks", "words", "-o", "eval.jsonl"]) == 2
    expected = "lm_eval is not installed. Expected it for evaluation: "
    assert expected in capsys.readouterr().err
