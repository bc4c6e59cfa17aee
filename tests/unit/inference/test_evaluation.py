"""Rows of eval.jsonl, exports, and errors, with a stand-in for lm_eval. tests/integration runs it."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import stub_lm_eval
from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.cli import main as titan
from torchtitan_like.inference import evaluation
from torchtitan_like.util.jsonl import read_rows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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


@pytest.mark.parametrize("package", evaluation.PACKAGES)
def test_missing_package_is_named(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    assert titan(["eval", str(tmp_path), "--tasks", "words", "-o", "eval.jsonl"]) == 2
    expected = f"{package} is not installed. Expected lm_eval, transformers, accelerate"
    assert expected in capsys.readouterr().err


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step in a run directory."""
    (tmp_path / "run/attempts").mkdir(parents=True)
    (tmp_path / "run/checkpoint").mkdir()
    return make_step(tmp_path / "run/checkpoint/step-7", MODEL)


def test_step_is_exported_to_a_temporary_folder_or_to_a_kept_one(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm_eval = stub_lm_eval.install(monkeypatch, tmp_path / "packages")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    command = ["eval", str(step), "--tasks", "words"]
    assert titan(command) == 0
    assert lm_eval.calls[0]["pretrained"].startswith(str(temporary))
    assert not list(temporary.glob("titan-eval-*")), "the export is removed"
    assert "Written to" in capsys.readouterr().out
    kept = tmp_path / "kept"
    assert titan([*command, "--export", str(kept)]) == 0
    assert lm_eval.calls[1]["pretrained"] == str(kept) and (kept / "config.json").exists()
    first, second = read_rows(tmp_path / "run/eval.jsonl")
    assert (first["step"], first["task"], first["metric"]) == (7, "words", "loss")
    assert second["value"] == first["value"]
    # The kept folder is an export, which is not exported again.
    capsys.readouterr()
    words = ["eval", str(kept), "--tasks", "words", "-o", str(tmp_path / "other.jsonl"), "--json"]
    assert titan(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["value"]) == (7, first["value"])
    for folder, message in ((kept, "is an export. Expected a step-N"), (step, "kept")):
        again = ["eval", str(folder), "--tasks", "words", "-o", "x.jsonl", "--export", str(kept)]
        assert titan(again) == 2 and message in capsys.readouterr().err


def test_options_reach_the_harness(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = stub_lm_eval.install(monkeypatch, tmp_path / "packages")
    kept, assets, tasks = tmp_path / "kept", "tests/assets/tokenizer", tmp_path / "tasks"
    tasks.mkdir()
    options = ["--dtype", "bfloat16", "--assets", assets, "--context", "32", "--limit", "2"]
    options += ["--num-fewshot", "1", "--batch-size", "4", "--include-path", str(tasks)]
    command = ["eval", str(step), "--tasks", "words", "--export", str(kept)]
    assert titan([*command, *options]) == 0
    (call,) = lm_eval.calls
    assert call.pop("task_manager").include_path == str(tasks)
    assert call == {
        "pretrained": str(kept),
        "dtype": "bfloat16",
        "tokenizer": assets,
        "max_length": 32,
        "batch_size": 4,
        "device": "cuda:0" if torch.cuda.is_available() else "cpu",
        "tasks": ["words"],
        "limit": 2,
        "num_fewshot": 1,
        "log_samples": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "words,sums"], "there is no task sums. Expected names"),
        (["--tasks", "words", "--include-path", "nowhere"], "nowhere is not a folder"),
        (["--tasks", "words", "--ema"], "has no averaged weights"),
    ],
)
def test_wrong_requests_are_rejected_before_the_export(
    words: list[str],
    message: str,
    step: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stub_lm_eval.install(monkeypatch, tmp_path / "packages")
    kept = tmp_path / "kept"
    assert titan(["eval", str(step), *words, "--export", str(kept)]) == 2
    assert message in capsys.readouterr().err and not kept.exists()


def test_folder_without_a_checkpoint_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_lm_eval.install(monkeypatch, tmp_path / "packages")
    assert titan(["eval", str(tmp_path), "--tasks", "words", "-o", "x.jsonl"]) == 2
    assert "is not a checkpoint: it has no manifest.json" in capsys.readouterr().err
