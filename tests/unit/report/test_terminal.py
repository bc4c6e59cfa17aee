"""`titan run watch` in a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import shutil
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.report.run_folder import event, step_row, write_killed_run, write_rows
from torchtitan_like.cli import main
from torchtitan_like.report.watch import BARS, Status, sparkline

NOW = 1_000_000.0


def write_live_run(run: Path, num_steps: int = 10) -> Path:
    """A run of 100 steps of 2 s, whose newest step ended 2 s ago."""
    last = NOW - 2
    rows = [step_row(n, last - 2 * (num_steps - n)) for n in range(1, num_steps + 1)]
    write_rows(run / "metrics.jsonl", rows)
    (run / "config.toml").write_text("[training]\nsteps = 100\n")
    for name in ("metrics.jsonl", "config.toml"):
        os.utime(run / name, (NOW, NOW))
    return run


def view_of(run: Path) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(Status.read(run, NOW).view())
    return [line.rstrip() for line in console.export_text().splitlines()]


def watch_in_terminal(run: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `titan run watch` writes to a terminal."""
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("TERM", "xterm-256color")
        assert main(["run", "watch", str(run), *words]) == 0
    written = b""
    # One read returns a part. Linux raises an error at the end, when the terminal is closed.
    with contextlib.suppress(OSError):
        while part := os.read(leader, 2**16):
            written += part
    os.close(leader)
    return written.decode()


def test_the_view_shows_progress_loss_rate_and_events(tmp_path: Path) -> None:
    run = write_live_run(tmp_path / "run")
    write_rows(
        run / "events.jsonl", [event("save", NOW - 5, step=n, seconds=1.5) for n in range(9)]
    )
    lines = view_of(run)
    assert lines[0] == "run  running"
    assert lines[1] == "step 10 of 100 (2 s ago), 640 tokens"
    assert lines[2].endswith("10.0%") and "━" in lines[2]
    assert lines[3] == "█▇▆▆▅▄▃▃▂▁  loss of steps 1 to 10"
    assert lines[4].startswith("loss 7.9000, grad_norm 1.0000")
    assert "2 s per step: 3:00 min left" in lines[5]
    assert [line[9:] for line in lines[-5:]] == [
        f"save at step {n}: attempt 1, 1.50 s" for n in range(4, 9)
    ]


def test_the_view_shows_a_newest_step_without_labels(tmp_path: Path) -> None:
    run = write_live_run(tmp_path / "run")
    rows = [step_row(10, NOW - 4), step_row(11, NOW - 2) | {"loss": None, "max_loss": None}]
    write_rows(run / "metrics.jsonl", rows)
    os.utime(run / "metrics.jsonl", (NOW, NOW))
    assert "loss none, grad_norm" in " ".join(view_of(run))


def test_a_sparkline_shows_means_and_non_finite_values() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([2.0], 10) == BARS[0] == sparkline([2.0, 2.0], 1)
    assert sparkline([0.0, 7.0, 3.0], 10) == "▁█▄"
    assert sparkline([1.0, 3.0, 9.0, 9.0], 2) == "▁█"
    assert sparkline([1.0, math.nan, math.inf, 2.0], 4) == "▁!!█"
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60


def test_an_ended_run_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_killed_run(tmp_path / "run")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the watch waits"))
    written = watch_in_terminal(run, monkeypatch=monkeypatch)
    assert "stopped: done (code 0) at step 8" in written
    assert "█" in written and "\x1b[" in written


def test_an_ended_run_is_printed_once_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_killed_run(tmp_path / "run")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the watch waits"))
    assert main(["run", "watch", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.count("stopped: done (code 0) at step 8") == 1
    assert "\x1b" not in text and "█" not in text


def test_watch_ends_when_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_live_run(tmp_path / "run")
    pauses = []

    def end_run(seconds: float) -> None:
        pauses.append(seconds)
        (run / "exit.json").write_text('{"reason": "requeue", "code": 75, "step": 10}')

    monkeypatch.setattr(time, "sleep", end_run)
    written = watch_in_terminal(run, "--every", "3", monkeypatch=monkeypatch)
    assert pauses == [3.0] and "stopped: requeue (code 75) at step 10" in written


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "attempts", "exit.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "torn"])
def test_files_may_be_missing_empty_or_torn(tmp_path: Path, name: str, damage: str) -> None:
    run = write_killed_run(tmp_path / "run")
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    elif damage == "torn":
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - 20])
    else:
        path.write_bytes(b"") if damage == "empty" else path.unlink()
    text = "\n".join(view_of(run))
    if name == "metrics.jsonl":
        assert ("step 7 of" if damage == "torn" else "no step has finished yet") in text.replace(
            "step 7 (", "step 7 of"
        )
    if name == "exit.json" and damage != "missing":
        assert f"{path} is malformed" in text.replace("\n", " ").replace("  ", " ")


def test_events_that_cannot_be_used_do_not_hide_the_run(tmp_path: Path) -> None:
    run = write_live_run(tmp_path / "run")
    write_rows(run / "events.jsonl", [{"time": NOW}])
    lines = view_of(run)
    assert lines[1] == "step 10 of 100 (2 s ago), 640 tokens"
    assert "end of events.jsonl: skipped 1 of 1 lines (no event)" in " ".join(lines)


def test_a_file_cannot_control_the_terminal(tmp_path: Path) -> None:
    run = write_live_run(tmp_path / "run")
    attack = event("[red]save\x1b]0;attacked\x07", NOW - 5, step=3, detail="\x1b[2J")
    write_rows(run / "events.jsonl", [attack])
    line = view_of(run)[-1]
    assert "[red]save\\x1b]0;attacked\\x07" in line and "\x1b" not in line
    assert json.dumps("\x1b[2J") not in line


def test_names_and_reasons_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OSC 52 writes the clipboard. The name of a folder may contain bytes that are not UTF-8."""
    attack = "\x1b]52;c;YXR0YWNr\x07\x9b2J\r"
    run = write_killed_run(tmp_path / os.fsdecode(b"\xff" + attack.encode()))
    (run / "exit.json").write_text(json.dumps({"reason": attack, "code": 1, "step": 8}))
    assert "\x1b]" not in watch_in_terminal(run, monkeypatch=monkeypatch)
    for words in (
        ["ls", tmp_path],
        ["watch", run],
        ["compare", run, run / "a"],
    ):
        main(["run", *map(str, words)])
        written = "".join(capsys.readouterr())
        assert not set("\x1b\x07\x9b\r") & set(written) and "\\x1b]52" in written, words
    assert main(["run", "report", str(run), "-o", str(tmp_path / "a.html")]) == 0
