"""A run that is followed: its state, and what a browser receives after its page."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.report.run_folder import Row, event, step_row, write_rows, write_steady_run
from torchtitan_like.report.figures import Drawing
from torchtitan_like.report.web import live
from torchtitan_like.report.web.boundary import Boundary
from torchtitan_like.report.web.index import update_index
from torchtitan_like.report.web.indexer import Indexer
from torchtitan_like.report.web.live import LiveRun, Message, Position
from torchtitan_like.report.web.status import LOST_SECONDS, RunStatus, StatusReader

NOTHING = Position("", 0)


def append_rows(run: Path, *rows: Row, name: str = "metrics.jsonl") -> None:
    with (run / name).open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


class Watched:
    """A run that is followed, with a clock."""

    def __init__(self, run: Path, cache: Path) -> None:
        self.run = run
        self.indexer = Indexer(cache)  # not started
        self.live = LiveRun("run", run, Boundary(run.parent), self.indexer)
        self.now = 5000.0

    def page(self) -> tuple[str, dict[str, Any]]:
        """Return the page and its data for live.js."""
        import html

        self.now += 60  # the page may be computed anew
        page = self.live.page(self.now)
        data = page.partition('<body data-page="')[2].partition('">')[0]
        return page, json.loads(html.unescape(data))

    def messages(self, shown: Position) -> tuple[list[Message], Position]:
        """Return the messages other than the status, and what is shown after them."""
        self.now += 60
        messages, shown = self.live.messages(shown, self.now)
        assert messages[0].event == "state"
        return messages[1:], shown


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A run of 20 steps. Its pages have no pictures, which take a second."""
    monkeypatch.setattr(live, "draw", lambda charts, *_, **__: Drawing([""] * len(charts), ""))
    return Watched(write_steady_run(tmp_path / "runs/run"), tmp_path / "cache")


# ---- changes


def test_new_rows_continue_the_curves(watched: Watched) -> None:
    _, data = watched.page()
    append_rows(watched.run, step_row(21, 1060.0, loss=1.0), step_row(22, 1062.0, loss=3.0, tps=5))
    append_rows(watched.run, step_row(23, 1064.0, loss="nan", grad_norm=7.0))
    (message,), shown = watched.messages(Position.parse(data["id"]))
    points = message.data["points"]
    assert points["0/loss"]["value"] == [1.0, 3.0] and points["0/loss"]["step"] == [21, 22]
    assert points["1/grad_norm"]["value"] == [1.0, 1.0, 7.0]
    losses = [8.0 - 0.01 * step for step in range(1, 21)] + [1.0, 3.0]
    expected = [np.mean(losses[11:21]), np.mean(losses[12:22])]
    assert points["0/loss.smoothed"]["value"] == pytest.approx(expected)
    assert points["0/loss"]["hours"] == [60 / 3600, 62 / 3600]
    assert message.id == str(shown) == f"{shown.version}.1"
    assert watched.messages(shown) == ([], shown)
    append_rows(watched.run, step_row(24, 1066.0, loss=2.0))
    (message,), _ = watched.messages(shown)
    expected = [np.mean([*losses[13:22], 2.0])]  # without the NaN of step 23
    assert message.data["points"]["0/loss.smoothed"]["value"] == pytest.approx(expected)


def test_a_row_is_sent_when_it_is_complete(watched: Watched) -> None:
    _, data = watched.page()
    line = json.dumps(step_row(21, 1060.0))
    with (watched.run / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
    messages, shown = watched.messages(Position.parse(data["id"]))
    assert messages == []
    with (watched.run / "metrics.jsonl").open("a") as file:
        file.write(line[20:] + "\n")
    (message,), _ = watched.messages(shown)
    assert message.data["points"]["0/loss"]["step"] == [21]


def test_a_browser_that_returns_gets_what_it_missed(watched: Watched) -> None:
    _, data = watched.page()
    shown = Position.parse(data["id"])
    for step in (21, 22, 23):
        append_rows(watched.run, step_row(step, 1000.0 + step))
        messages, shown = watched.messages(shown)
    assert [message.id for message in messages] == [str(shown)]
    missed, end = watched.messages(Position(shown.version, 1))
    assert [one.data["points"]["0/loss"]["step"] for one in missed] == [[22], [23]]
    assert end == shown
    for unknown in (NOTHING, Position("other", 2), Position(shown.version, 99)):
        messages, end = watched.messages(unknown)
        assert [one.event for one in messages] == ["page", "rows", "rows", "rows"]
        assert end == shown


def test_a_resume_that_discards_rows_gives_a_new_version(watched: Watched) -> None:
    _, data = watched.page()
    write_rows(watched.run / "new", [step_row(n, 2000.0 + n) for n in range(1, 11)])
    (watched.run / "new").replace(watched.run / "metrics.jsonl")
    (message,), _ = watched.messages(Position.parse(data["id"]))
    assert message.event == "page" and message.data["signature"] == data["signature"]
    update = json.loads(watched.live.update())
    assert update["sources"]["0/loss"]["data"]["step"] == list(range(1, 11))
    assert update["version"] == message.data["version"]
    assert any("10 of 20" in section["html"] for section in update["sections"])
    assert len(update["captions"]) == 3


def test_an_event_gives_a_new_version_and_a_new_kind_new_figures(watched: Watched) -> None:
    append_rows(watched.run, event("save", 1030.0, step=5, seconds=1.0), name="events.jsonl")
    _, data = watched.page()
    append_rows(watched.run, event("save", 1040.0, step=10, seconds=1.0), name="events.jsonl")
    (message,), shown = watched.messages(Position.parse(data["id"]))
    assert message.data["signature"] == data["signature"]
    assert json.loads(watched.live.update())["sources"]["event/save"]["data"]["step"] == [5, 10]
    append_rows(watched.run, event("spike", 1040.0, step=11), name="events.jsonl")
    (message,), _ = watched.messages(shown)
    assert message.data["signature"] != data["signature"]


def test_many_new_rows_are_thinned(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_NEW_ROWS", 5)
    _, data = watched.page()
    append_rows(watched.run, *(step_row(n, 1000.0 + n) for n in range(21, 30)))
    (message,), _ = watched.messages(Position.parse(data["id"]))
    assert message.event == "page"


def test_a_view_is_not_computed_again_and_again(watched: Watched) -> None:
    watched.page()
    append_rows(watched.run, event("save", 1030.0, step=5), name="events.jsonl")
    watched.messages(NOTHING)
    append_rows(watched.run, event("save", 1040.0, step=6), name="events.jsonl")
    _, soon = watched.live.messages(NOTHING, watched.now + 0.5 * live.MIN_PAUSE)
    _, later = watched.messages(NOTHING)
    assert soon.version != later.version


def test_a_run_before_its_first_row_has_a_page(watched: Watched) -> None:
    (watched.run / "metrics.jsonl").unlink()
    page, data = watched.page()
    assert "Summary of run" in page and "Values at the step" not in page
    append_rows(watched.run, step_row(1, 1012.0))
    (message,), _ = watched.messages(Position.parse(data["id"]))
    assert message.data["signature"] != data["signature"], "the page is loaded again with curves"


def test_a_long_run_is_shown_from_its_tail_until_it_is_indexed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_WAITED_BYTES", 100)
    page, data = watched.page()
    assert "as soon as the rows are indexed" in page and "Summary" not in page
    assert "step 20 of 20" in page and "<progress" in page
    with pytest.raises(ValueError, match="is not indexed"):
        watched.live.update()
    update_index(watched.run / "metrics.jsonl", watched.indexer.cache)
    (message,), _ = watched.messages(Position.parse(data["id"]))
    assert message.event == "page" and "Summary" in watched.page()[0]


def test_a_run_that_cannot_be_read_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    watched = Watched(run, tmp_path / "cache")
    assert "unreadable" in watched.page()[0]


def test_positions_of_other_servers_are_no_page() -> None:
    assert Position.parse("a-1.7") == Position("a-1", 7)
    for text in ("", "a", "a.", "a.-1", "a.b", "." * 9, "a." + "9" * 5000, "a.\u0663"):
        assert Position.parse(text) == NOTHING


# ---- states


def read_status(run: Path, now: float) -> RunStatus:
    return StatusReader(run, Boundary(run.parent)).read(now)


def write_heartbeats(run: Path, pids: list[int], *, host: str = "", phase: str = "step") -> None:
    for rank, pid in enumerate(pids):
        beat = {"phase": phase, "step": 21, "micro_batch": 0, "time": 1051.0, "pid": pid}
        beat["host"] = host or socket.gethostname()
        write_rows(run / f"attempts/1/heartbeat/rank-{rank}.json", [beat])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 steps whose newest row, step 20, is of 1050 s. A step takes 2 s."""
    run = write_steady_run(tmp_path / "run")
    (run / "config.toml").write_text("[training]\nsteps = 40\n")
    return run


@pytest.fixture(scope="module")
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_running_run_has_numbers_and_a_time_left(run: Path) -> None:
    append_rows(run, step_row(21, 1052.0, tps=100.0, mfu=40.0), step_row(22, 1054.0))
    write_heartbeats(run, [os.getpid()], host="elsewhere")
    status = read_status(run, 1055.0)
    assert (status.state, status.detail) == ("running", "step at step 21")
    assert (status.step, status.total_steps, status.tokens) == (22, 40, 1408)
    assert (status.tps, status.mfu, status.updated) == (100.0, 40.0, 1054.0)
    assert status.seconds_left == 36.0 and status.loss == 8.0 - 0.22


def test_a_run_without_progress_hangs_and_later_counts_as_stopped(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    assert read_status(run, 1051.0 + 59).state == "running"
    hung = read_status(run, 1051.0 + 65)
    assert (hung.state, hung.detail) == ("hung", "no progress for 1:05 min, step at step 21")
    assert hung.seconds_left is None
    lost = read_status(run, 1051.0 + LOST_SECONDS + 1)
    assert lost.state == "stopped" and lost.detail.startswith("no end recorded")


def test_slow_steps_are_not_hung(run: Path) -> None:
    write_rows(run / "metrics.jsonl", [step_row(n, 1000.0 + 100 * n) for n in range(1, 11)])
    assert read_status(run, 2000.0 + 490).state == "running"
    assert read_status(run, 2000.0 + 510).state == "hung"


def test_the_reason_of_an_end(run: Path, ended_pid: int) -> None:
    write_heartbeats(run, [ended_pid])
    (run / "exit.json").write_text('{"reason": "done", "code": 0, "step": 20}')
    status = read_status(run, 1e9)
    assert (status.state, status.detail) == ("stopped", "done (code 0) at step 20")
    (run / "exit.json").write_text("{")
    assert read_status(run, 1e9).state == "unreadable"


def test_a_killed_process_stops_the_run(run: Path, ended_pid: int) -> None:
    write_heartbeats(run, [ended_pid])
    status = read_status(run, 1052.0)
    assert status.state == "stopped"
    assert status.detail == "killed: the processes of rank 0 are gone, without an error"
    write_heartbeats(run, [os.getpid(), ended_pid])
    heartbeat = run / "attempts/1/heartbeat/rank-0.json"
    heartbeat.write_text(heartbeat.read_text().replace("1051.0", "1e11"))  # since this process
    status = read_status(run, 1052.0)
    assert status.state == "hung"
    assert status.detail == "the process of rank 1 is gone, without an error"


def test_the_number_of_a_process_may_belong_to_a_new_one(run: Path) -> None:
    write_heartbeats(run, [os.getpid()])  # of 1051 s, long before this process
    assert read_status(run, 1052.0).state == "stopped"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"phase": "end"}])
def test_processes_of_other_machines_and_ended_ones_are_not_killed(
    run: Path, ended_pid: int, change: dict[str, str]
) -> None:
    write_heartbeats(run, [ended_pid], **change)
    assert read_status(run, 1052.0).state == "running"


def test_the_first_error_and_the_ranks_without_one_are_the_reason(run: Path) -> None:
    write_heartbeats(run, [1, 1], host="elsewhere")
    error = {"rank": 0, "phase": "step", "step": 21, "time": 1052.0, "host": "a"}
    error["traceback"] = "Traceback\n  File x\nRuntimeError: Connection closed by peer\n"
    for name in ("first", "rank-0"):
        write_rows(run / f"attempts/1/errors/{name}.json", [error])
    expected = (
        "error on rank 0 in phase step at step 21: RuntimeError: Connection closed by peer; "
        "no error of rank 1: killed, or it hung"
    )
    assert read_status(run, 1053.0).detail == expected
    (run / "exit.json").write_text('{"reason": "lost_peer", "code": 69, "step": 21}')
    expected = "lost_peer (code 69) at step 21; no error of rank 1: killed, or it hung"
    assert read_status(run, 1053.0).detail == expected


def test_a_new_attempt_runs_again(run: Path) -> None:
    error = {"rank": 0, "phase": "step", "step": 21, "traceback": "x"}
    write_rows(run / "attempts/1/errors/first.json", [error])
    assert read_status(run, 1053.0).state == "stopped"
    (run / "attempts/2").mkdir()
    assert read_status(run, 1053.0).state == "running"


def test_damaged_rows_are_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "loss": \n\xff\n{"step": "x"}\n{"step": 22, "time": "no"}\n{"st')
    status = read_status(run, 1053.0)
    assert (status.state, status.step, status.updated, status.loss) == ("running", 22, 1050.0, None)


@pytest.mark.parametrize("content", [b"", b"\0\xff{[", b"[]\n", b"[7]", b"7", b'{"time": "x"}\n'])
@pytest.mark.parametrize(
    "name",
    [
        *("exit.json", "config.toml", "metrics.jsonl", "events.jsonl"),
        *("attempts/1/heartbeat/rank-0.json", "attempts/1/errors/first.json"),
    ],
)
def test_damaged_files_never_break_a_page(watched: Watched, name: str, content: bytes) -> None:
    file = watched.run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    assert "Summary of run" in watched.page()[0]
    assert read_status(watched.run, 1053.0).state


def test_files_that_have_not_changed_are_not_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_like.report.web import status as status_module

    reader = StatusReader(run, Boundary(run.parent))
    first = reader.read(1053.0)
    monkeypatch.setattr(status_module, "read_tail", None)
    monkeypatch.setattr(status_module, "read_run_config", None)
    assert reader.read(1053.0) == first
