"""Reports of run directories that are damaged, incomplete, old or still being written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.report.run_folder import step_row, write_killed_run, write_rows, write_steady_run
from torchtitan_like.report import tolerant
from torchtitan_like.report.columns import read_columns
from torchtitan_like.report.history import build_history
from torchtitan_like.report.recorded import read_run
from torchtitan_like.report.summary import summarize


def test_a_torn_last_line_and_damaged_lines_lose_no_other_row(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_rows(file, [step_row(1, 1.0), step_row(2, 2.0)])
    lines = [b'{"step": 3, "lo\xff\n', b"[1]\n", b'{"loss": 2.0}\n', b"\n", b'{"step": true}\n']
    with file.open("ab") as stream:
        stream.write(b"".join(lines) + json.dumps(step_row(6, 6.0)).encode() + b'\n{"step": 7, "l')
    columns, problems = read_columns(file)
    assert columns.get("step").tolist() == [1, 2, 6]
    assert problems == [
        "metrics.jsonl: skipped 2 of 9 lines (not a JSON object): line 3, 4",
        "metrics.jsonl: skipped 1 of 9 lines (no step): line 5",
        "metrics.jsonl: skipped 1 of 9 lines (step is not a step number): line 7",
        "metrics.jsonl: skipped 1 of 9 lines (incomplete): line 9",
    ]


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tolerant, "MAX_LINE", 64)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + b"x" * 1000 + b'\n{"step": 2}\n')
    columns, problems = read_columns(file)
    assert columns.get("step").tolist() == [1, 2]
    assert problems == ["metrics.jsonl: skipped 1 of 3 lines (too long): line 2"]


def test_values_become_columns_with_nan_where_they_are_missing(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": "nan", "sources": {"a": {"loss": 2.5}}, "moe": {"by_layer": [1]}},
        {"step": 2, "loss": "inf"},
        {"step": 3, "loss": 1.5, "tps": 7, "big": 10**400},
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    columns, problems = read_columns(tmp_path / "metrics.jsonl")
    assert problems == []
    assert columns.names() == ["step", "loss", "sources.a.loss", "tps", "big"]
    assert columns.get("loss").tolist()[1:] == [math.inf, 1.5]
    assert math.isnan(columns.get("loss")[0]) and math.isnan(columns.get("tps")[0])
    assert columns.get("sources.a.loss")[0] == 2.5
    assert len(columns.get("unknown")) == 3


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "validation.jsonl", "config.toml", "exit.json"]
)
@pytest.mark.parametrize("content", [None, b"", b"\0\xff{[", b"[]\n", b"7"])
def test_any_file_may_be_missing_empty_or_damaged(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    run = write_killed_run(tmp_path)
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    numbers = summarize(build_history(read_run(run)))
    assert len(numbers["attempts"]) == 3
    is_damaged = content is not None and (content != b"" or name == "exit.json")
    assert any(name in problem for problem in numbers["problems"]) == is_damaged


@pytest.mark.parametrize("name", ["attempts", "attempts/2", "metrics.discarded-3.jsonl"])
def test_attempts_may_be_missing(tmp_path: Path, name: str) -> None:
    run = write_killed_run(tmp_path)
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    history = build_history(read_run(run))
    assert history.goodput.wall == 120
    assert [attempt.recorded.number for attempt in history.attempts] == [1, 2, 3]


def test_damaged_files_of_an_attempt_are_reported(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path)
    for name in ("config.toml", "errors/first.json", "heartbeat/rank-0.json"):
        (run / "attempts/2" / name).write_bytes(b"{\xff")
    (run / "attempts/2/heartbeat/rank-x.json").write_text("{}")
    write_rows(run / "checkpoint/step-3/manifest.json", [{"step": 3}])
    problems = "\n".join(read_run(run).problems)
    for text in ("2/config.toml", "attempts/2/errors", "attempts/2/heartbeat", "step-3/manifest"):
        assert text in problems


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(1, 40), st.binary(max_size=40))
def test_bytes_may_be_overwritten_anywhere(
    tmp_path: Path, offset: int, length: int, noise: bytes
) -> None:
    run = tmp_path / "run"
    write_killed_run(run)
    for file in sorted(run.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            start = offset % (len(content) + 1)
            file.write_bytes(content[:start] + noise + content[start + length :])
    summarize(build_history(read_run(run)))


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run: .* Expected"):
        read_run(tmp_path)


def test_checkpoints_are_compared_with_their_manifests(tmp_path: Path) -> None:
    run = write_steady_run(tmp_path)
    for step, size in ((5, 4), (10, 3)):
        folder = run / f"checkpoint/step-{step}"
        files = {"shard-0.bin": {"size": 4, "extents": []}}
        manifest = {"step": step, "kind": "full", "files": files, "numeric": {"layout": "tp 2"}}
        write_rows(folder / "manifest.json", [manifest])
        (folder / "shard-0.bin").write_bytes(b"x" * size)
    write_rows(run / "checkpoint/step-15.nonfinite/manifest.json", [manifest])  # not a step
    (run / "checkpoint/step-5/PIN").touch()
    first, second = read_run(run).checkpoints
    assert (first.step, first.state, first.is_pinned, first.layout) == (5, "complete", True, "tp 2")
    assert (second.state, second.is_pinned) == ("shard-0.bin has 3 bytes, expected 4", False)


def test_warnings_of_a_log_are_counted_by_text(tmp_path: Path) -> None:
    run = write_steady_run(tmp_path)
    log = run / "attempts/1/logs/rank0.log"
    log.parent.mkdir(parents=True)
    head = "[titan] 2026-01-02 03:04:05,678 - root -"
    log.write_text(
        f"{head} INFO - Model llama3 8B size: 8,030,261,248 total parameters\n"
        f"{head} WARNING - Slow data at step 5\n"
        f"{head} WARNING - Slow data at step 17\n"
        f"{head} ERROR - Spike\nno log line\n"
    )
    (attempt,) = read_run(run).attempts
    assert (attempt.model, attempt.num_parameters) == ("llama3 8B", 8_030_261_248)
    found = [(warning.level, warning.text, warning.count) for warning in attempt.warnings]
    assert found == [("WARNING", "Slow data at step 5", 2), ("ERROR", "Spike", 1)]
