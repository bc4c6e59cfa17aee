"""`titan run report`: the page and its numbers."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.runner import ROOT
from tests.unit.report.run_folder import (
    SCRIPT,
    event,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from torchtitan_like.cli import main
from torchtitan_like.report.curves import build_charts, build_marks, run_color
from torchtitan_like.report.events import CLASS_COLORS
from torchtitan_like.report.history import build_history, read_histories
from torchtitan_like.report.recorded import read_run

MAX_BYTES = 3_000_000
# Attributes with which a page loads something from elsewhere.
EXTERNAL = re.compile(r"<(?:script|link|img|iframe|object)\b[^>]*\b(?:src|href)=(?![\"']?data:)")


class Elements(HTMLParser):
    """Counts the elements of a page and collects its text outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] not in ("script", "style"):
            self.texts.append(data)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return the exit code and all output."""
    code = main(["run", "report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def page_of(capsys: pytest.CaptureFixture[str], *arguments: object, folder: Path) -> str:
    page = folder / "page.html"
    code, output = report(capsys, *arguments, "-o", page)
    assert code == 0, output
    assert output.startswith(f"Wrote {page}")
    return page.read_text()


def numbers_of(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict[str, Any]:
    code, output = report(capsys, *runs, "--json")
    assert code == 0, output
    numbers: dict[str, Any] = json.loads(output)
    return numbers


# ---- the page


def test_the_page_shows_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_killed_run(tmp_path / "run")
    write_rows(run / "eval.jsonl", [{"step": 8, "task": "hellaswag", "metric": "acc", "value": 1}])
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("moon phase", 200.0, 3, step=7, phase="full")) + "\n")
    text = " ".join(Elements(page_of(capsys, run, folder=tmp_path)).texts)
    for shown in (
        "Where the wall time went",
        "8.33 %",  # goodput
        "Attempts",
        "Last error",
        "RuntimeError",
        "resume on another layout",
        "config change",
        "moon phase",
        "phase full",
        "hellaswag",
        "Changes between attempts",
        "skipped step",
    ):
        assert shown in text, shown


@pytest.mark.parametrize(
    ("end", "tone", "line", "advice"),
    [
        (("done", 0), "done", "stopped: done (code 0) at step 20", ""),
        (
            ("requeue", 75),
            "paused",
            "stopped: requeue (code 75) at step 20: deadline",
            "The same command continues the run.",
        ),
        (
            ("bad_numbers", 70),
            "failed",
            "stopped: bad_numbers (code 70) at step 20: the next step has a non-finite loss",
            "titan run replay {run}/attempts/1/bad-steps/step-21.json",
        ),
    ],
)
def test_the_page_begins_with_the_state_its_cause_and_what_to_do(
    end: tuple[str, int],
    tone: str,
    line: str,
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_steady_run(tmp_path / "run")
    write_rows(run / "attempts/1/bad-steps/step-9.json", [])
    write_rows(run / "attempts/1/bad-steps/step-21.json", [])
    write_rows(run / "exit.json", [{"reason": end[0], "code": end[1], "step": 20}])
    stop = event("stop", 1050.0, reason=end[0], code=end[1], cause="deadline", step=20)
    write_rows(run / "events.jsonl", [stop])
    page = page_of(capsys, run, folder=tmp_path)
    banner, _, rest = page.partition('<nav aria-label="Sections">')
    assert f'<section class="banner {tone}">' in banner and line in banner
    assert advice.format(run=run) in banner and 'id="curves"' in rest
    redacted = page_of(capsys, run, "--redact", folder=tmp_path)
    assert line.split(" ")[1] in redacted and str(tmp_path) not in redacted


def test_the_page_shows_words_and_one_color_for_a_category(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_steady_run(tmp_path / "run")
    layout = {"dp_shard": 2, "tp": 1}
    start = event("start", 1004.0, step=0, began=1000.0, num_ranks=2, layout=layout)
    save = event("save", 1030.0, step=10, form="full", seconds=2.345678)
    write_rows(run / "events.jsonl", [start, save])
    (run / "config.toml").write_text('[data]\nsources = ["a", "b"]\n[optimizer]\nlr = 0.5\n')
    page = page_of(capsys, run, folder=tmp_path)
    text = " ".join(Elements(page).texts)
    assert "attempt 1, 2 ranks, dp_shard 2" in text and "attempt 1, full, 2.35 s" in text
    assert "{" not in text and '["' not in text and "1,000" not in text
    assert "optimizer.lr 0.5 0.0008" in re.sub(r"\s+", " ", text)  # and its default
    colors = {
        color
        for name in ("checkpoint", "save")
        for color in re.findall(rf'<b style="background:(#\w+)"></b>{name}\b', page)
    }
    assert colors == {CLASS_COLORS["checkpoint"]}


def test_the_page_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(capsys, write_steady_run(tmp_path / "run"), folder=tmp_path)
    assert EXTERNAL.search(re.sub(r"(?s)(<script\b[^>]*>).*?</script>", r"\1", page)) is None
    assert "default-src 'none'" in page and "connect-src 'none'" in page


def test_names_and_log_lines_with_html_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Elements(page_of(capsys, write_killed_run(tmp_path / "run"), folder=tmp_path))
    attack = "<script>attack()<"
    run = write_killed_run(tmp_path / attack)
    steps = [step_row(n, 108.0 + n, sources={SCRIPT: {"loss": 5.0}}) for n in range(1, 4)]
    write_rows(run / "metrics.jsonl", steps)
    write_rows(run / "validation.jsonl", [{"step": 2, "set": SCRIPT, "loss": 5.0, "time": 112.0}])
    write_rows(run / "eval.jsonl", [{SCRIPT: SCRIPT}])
    write_rows(run / "events.jsonl", [event(SCRIPT, 110.0, step=2, detail=SCRIPT)])
    log = run / "attempts/3/logs/rank0.log"
    log.parent.mkdir()
    log.write_text(f"[titan] 2026-01-01 00:00:00,0 - root - WARNING - {SCRIPT}\n")
    (run / "config.toml").write_text(f'[job]\ndescription = "{SCRIPT}"\n')
    attacked = Elements(page_of(capsys, run, folder=tmp_path))
    assert attacked.names.count("script") == plain.names.count("script")
    assert "attack" in "".join(attacked.texts) and "attacked" in "".join(attacked.texts)


def test_redaction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_killed_run(tmp_path / "private-project")
    environment = run / "attempts/3/environment"
    environment.mkdir()
    (environment / "facts.json").write_text(json.dumps({"host": "node18", "cpu": "Secret CPU"}))
    (environment / "variables.txt").write_text("PATH=/home/me/bin\n")
    log = run / "attempts/3/logs/rank0.log"
    log.parent.mkdir()
    log.write_text("[titan] 2026-01-01 00:00:00,0 - root - WARNING - my log text\n")
    config = '[job]\ndump_folder = "outputs-of-me"\n[data.sources.a]\npath = "/data/a"\n'
    for file in (run / "config.toml", run / "attempts/3/config.toml"):
        file.write_text(config + '[comm]\nleader = "node18:29500"\n')
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("note", 200.0, 3, step=7, text=["on node18"])) + "\n")
    with (run / "attempts/2/config.toml").open("a") as file:
        file.write("damaged")
    secrets = (
        "private-project", "node17", "node18", "Secret CPU", "/home/me", "/data/a", "my log text",
        "outputs-of-me", "secret.py", "attacked", str(tmp_path),
    )  # fmt: skip
    page = page_of(capsys, run, "--redact", folder=tmp_path)
    _, numbers = report(capsys, run, "--redact", "--json")
    for secret in secrets:
        assert secret not in page and secret not in numbers, secret
    assert "(redacted)" in page and "resume on another layout" in page
    open_page = page_of(capsys, run, folder=tmp_path)
    assert all(secret in open_page for secret in secrets[:-1])


def test_a_page_is_written_again_until_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page = write_steady_run(tmp_path / "run"), tmp_path / "page.html"
    refresh = '<meta http-equiv="refresh" content="60">'
    pauses = []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        html = page.read_text()
        assert html.count(refresh) == 1 and "and again every 60 s." in html
        assert ("<dd>21<small>of 20</small></dd>" in html) == (len(pauses) == 2)
        if len(pauses) == 1:
            write_rows(run / "metrics.jsonl", [step_row(n, 1000.0 + n) for n in range(1, 22)])
        else:
            (run / "exit.json").write_text('{"reason": "done", "code": 0, "step": 21}')

    monkeypatch.setattr(time, "sleep", wait)
    code, output = report(capsys, run, "-o", page, "--every", 60)
    assert (code, pauses, output.count("Wrote")) == (0, [60.0, 60.0], 2)
    html = page.read_text()
    assert 'http-equiv="refresh"' not in html and "stopped: done (code 0) at step 21" in html


def test_ctrl_c_ends_the_writing_of_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    run, page = write_steady_run(tmp_path / "run"), tmp_path / "page.html"
    assert report(capsys, run, "-o", page, "--every", 5)[0] == 0
    assert "<h1>run</h1>" in page.read_text()


@pytest.mark.parametrize("words", [["--every", "0"], ["--every", "5", "--json"]])
def test_wrong_arguments_are_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["run", "report", str(write_steady_run(tmp_path / "run")), *words])
    assert error.value.code == 2


def test_no_torch_is_imported(tmp_path: Path) -> None:
    run, page = write_steady_run(tmp_path / "run"), tmp_path / "page.html"
    code = (
        "import sys; from torchtitan_like.cli import main; "
        f"main(['run', 'report', {str(run)!r}, '-o', {str(page)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert page.exists()


def test_a_page_of_100_000_steps_is_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).random((100_000, 4)).tolist()
    logged = {"hfu": 5.0, "memory_gib": 7.0, "moe": {"max_violation": 0.5, "load_entropy": 0.9}}
    rows = (
        step_row(
            step,
            1000.0 + step,
            loss=2 + a,
            grad_norm=b,
            data_loading_s=c,
            sources={"a": {"loss": c}, "b": {"loss": d}},
            **({} if step % 10 else logged | {"tps": 1000 * d, "mfu": a, "step_s": b}),
        )
        for step, (a, b, c, d) in enumerate(values, start=1)
    )
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    saves = (event("save", 1000.0 + n, step=n, seconds=0.1) for n in range(50, 100_000, 50))
    write_rows(tmp_path / "run/events.jsonl", saves)
    page = page_of(capsys, tmp_path / "run", folder=tmp_path)
    assert len(page.encode()) <= MAX_BYTES
    assert re.search(r"run: \d+ of 1,999 events save are drawn", page)


def test_bokeh_is_required_for_the_page_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    run = write_steady_run(tmp_path / "run")
    code, output = report(capsys, run, "-o", tmp_path / "page.html")
    assert code == 2
    assert "The page needs Bokeh, which is not installed. Expected the package, or --json" in output
    assert report(capsys, run, "--json")[0] == 0


# ---- curves


def test_every_drawn_point_is_a_row_of_the_file(tmp_path: Path) -> None:
    losses = np.random.default_rng(1).random(30_000)
    losses[12_345] = 77.0
    rows = [step_row(n, 1000.0 + n, loss=loss) for n, loss in enumerate(losses.tolist(), start=1)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    charts = build_charts([build_history(read_run(tmp_path))])
    by_step = {row["step"]: row for row in rows}
    (curve,) = [curve for curve in charts[0].curves if curve.label == "train"]
    assert 12_346 in curve.step
    for step, tokens, loss in zip(curve.step, curve.tokens, curve.values, strict=True):
        row = by_step[int(step)]
        assert (row["n_tokens_seen"], row["loss"]) == (tokens, loss)


def test_the_page_contains_the_rows_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [math.pi / n for n in range(1, 21)]
    rows = [step_row(n, 1000.0 + n, loss=loss) for n, loss in enumerate(losses, start=1)]
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    page = page_of(capsys, tmp_path / "run", folder=tmp_path)
    arrays = [
        gzip.decompress(base64.b64decode(text))
        for text in re.findall(r'"data":"(H4sI[A-Za-z0-9+/=]+)"', page)
    ]
    assert np.array(losses).tobytes() in arrays


def test_events_are_at_their_steps(tmp_path: Path) -> None:
    history = build_history(read_run(write_killed_run(tmp_path)))
    marks = {mark.kind: mark for mark in build_marks(history)}
    assert marks["save"].step.tolist() == [3] and marks["save"].tokens.tolist() == [192]
    assert marks["save"].hours.tolist() == [15 / 3600]
    assert marks["resume"].step.tolist() == [3]
    assert marks["resume on another layout"].details == ["attempt 3, ranks 1 -> 2"]
    assert "optimizer.lr 0.0008 -> 0.0006" in marks["config change"].details[0]
    assert marks["skipped step"].step.tolist() == [5]
    assert "start" not in marks


# ---- numbers


def test_numbers_are_computed_from_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(2)
    losses, speeds = generator.random(5_001).tolist(), generator.random(5_001).tolist()
    rows = [
        step_row(n, 1000.0 + n, loss=loss, tps=tps)
        for n, (loss, tps) in enumerate(zip(losses, speeds, strict=True), start=1)
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    ((numbers,), _) = numbers_of(capsys, tmp_path).values()
    assert numbers["num_rows"] == 5_001 and numbers["tokens"] == 64 * 5_001
    assert numbers["loss"]["min"] == {
        "value": min(losses),
        "step": losses.index(min(losses)) + 1,
    }
    assert numbers["loss"]["last"] == losses[-1]
    assert numbers["loss"]["last_smoothed"] == pytest.approx(statistics.mean(losses[-50:]))
    assert numbers["median"]["tps"] == statistics.median(speeds)
    assert numbers["wall_seconds"] == 5_000
    assert sum(numbers["goodput_seconds"].values()) == pytest.approx(5_000)


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_steady_run(tmp_path / "a/run", 20), write_steady_run(tmp_path / "b/run", 40)
    result = numbers_of(capsys, a, b)
    assert [run["name"] for run in result["runs"]] == ["run (1)", "run (2)"]
    comparison = result["comparison"]
    assert comparison["config_differences"] == {"training.steps": [20, 40]}
    last = comparison["loss_at_equal_tokens"][-1]
    assert (last["at"], last["step"]) == (20 * 64, [20, 20])
    assert last["loss"] == pytest.approx([statistics.mean(8 - 0.01 * n for n in range(11, 21))] * 2)
    half = comparison["loss_at_equal_hours"][1]
    assert half["at"] == pytest.approx(25 / 3600) and half["step"] == [7, 7]
    text = " ".join(Elements(page_of(capsys, a, b, folder=tmp_path)).texts)
    order = ("Settings that differ", "Numbers", "Loss at equal tokens", "Horizontal axis", "Events")
    positions = [text.index(name) for name in order]
    assert positions == sorted(positions)
    html = page_of(capsys, a, b, folder=tmp_path)
    for number, name in enumerate(("run (1)", "run (2)")):
        color = run_color(number, 2)
        assert html.count(f'<b style="background:{color}"></b>{name}') == 5  # banner, four tables
        curves = build_charts(read_histories([a, b], is_redacted=False))[0].curves
        assert {c.color for c in curves if c.label.startswith(name)} == {color}
