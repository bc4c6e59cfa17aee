"""`titan run ls|watch|save|stop`: reports on intact and damaged runs, and switch files."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.harness.examples import example_words
from tests.harness.runner import ROOT
from torchtitan_like.cli import main
from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.report.runs import list_runs
from torchtitan_like.report.tolerant import METRICS_KINDS, newest_rows
from torchtitan_like.report.watch import Status
from torchtitan_like.resilience.agreement import Request, Switches
from torchtitan_like.util.units import format_clock

NOW = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run at step 10 of 100, with 2 s per step and two checkpoints an hour apart."""
    return write_run(tmp_path / "runs/a", NOW)


def write_run(folder: Path, now: float) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": n,
            "n_tokens_seen": 64 * n,
            "loss": 3.5,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "time": now - 2 * (11 - n),
        }
        for n in range(1, 11)
    ]
    rows[-2] |= {"tps": 1234.0, "tflops": 5.0, "mfu": 41.2, "memory_gib": 7.5}
    lines = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo'
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "config.toml").write_text(
        "[checkpoint]\nenable = true\n[training]\nseq_len = 8\nsteps = 100 # of 64 tokens\n"
    )
    for step in (5, 10):
        checkpoint = folder / f"checkpoint/step-{step}"
        checkpoint.mkdir(parents=True)
        for name in ("manifest.json", "shard-0.bin", "config.toml"):
            (checkpoint / name).write_bytes(b"x" * 8192)
        os.utime(checkpoint / "manifest.json", (now, now + 720 * step))
    for name in ("metrics.jsonl", "config.toml"):
        os.utime(folder / name, (now, now))
    return folder


def write_heartbeat(
    run: Path, rank: int, step: int, micro_batch: int, seconds: float, attempt: int = 2
) -> None:
    file = run / f"attempts/{attempt}/heartbeat/rank-{rank}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"phase": "train", "step": step, "micro_batch": micro_batch, "time": NOW - seconds}
    file.write_text(json.dumps(content))
    os.utime(file, (NOW - seconds, NOW - seconds))


def titan_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return the exit code and all output."""
    code = main(["run", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


# ---- watch


def test_progress_and_time_left(run: Path) -> None:
    text = "\n".join(Status.read(run, NOW).lines())
    assert "step 10 of 100 (2 s ago), 640 tokens" in text, "expected no half-written row"
    assert "loss 3.5000" in text
    assert "1,234 tokens/s on each device, 5.00 TFLOP/s, 41.2 % MFU, 7.50 GiB" in text
    assert "2 s per step: 3:00 min left" in text
    assert "ended" not in text and "ranks" not in text


def test_ranks_are_grouped_by_step_and_micro_batch(run: Path) -> None:
    write_heartbeat(run, 0, step=99, micro_batch=9, seconds=0, attempt=1)  # of an earlier attempt
    for rank in (0, 1, 3):
        write_heartbeat(run, rank, step=11, micro_batch=2, seconds=1)
    write_heartbeat(run, 2, step=11, micro_batch=1, seconds=90)
    lines = Status.read(run, NOW).rank_lines()
    start = "1 of 4 ranks in step 11 micro-batch 1 train"
    assert lines[0] == f"{start}, last heartbeat up to 1:30 min ago: 2"
    start = "3 of 4 ranks in step 11 micro-batch 2 train"
    assert lines[1] == f"{start}, last heartbeat up to 1 s ago: 0, 1, 3"
    assert lines[2:] == ["SILENT for more than 60 s: ranks 2"]


MALFORMED_HEARTBEATS = ("{", "[]", "{}", '{"time": 1, "step": "x"}', '{"time": Infinity}')


def test_a_malformed_heartbeat_is_ignored(run: Path) -> None:
    write_heartbeat(run, 0, step=11, micro_batch=2, seconds=1)
    for rank, content in enumerate(MALFORMED_HEARTBEATS, start=1):
        (run / f"attempts/2/heartbeat/rank-{rank}.json").write_text(content)
    (run / "attempts/2/heartbeat/rank-x.json").write_text('{"step": 11, "time": 1}')
    (line,) = Status.read(run, NOW).rank_lines()
    assert line.startswith("1 of 1 ranks in step 11")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "7 s"), (306, "5:06 min"), (14_700, "4:05 h"), (273_900, "3 d 04:05 h")],
)
def test_format_of_durations(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def test_only_the_newest_rows_of_a_long_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5000)))
    rows, _ = newest_rows(file, ["step"], METRICS_KINDS)
    assert [rows[0]["step"], rows[-1]["step"]] == [4000, 4999]
    rows, _ = newest_rows(file, ["step"], METRICS_KINDS, max_bytes=40)
    assert [row["step"] for row in rows] == [4998, 4999]


@pytest.mark.parametrize("verb", ["watch", "save", "stop"])
def test_a_folder_that_is_not_a_run_is_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ["--once"] if verb == "watch" else []
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, text = titan_run(capsys, verb, folder, *once)
        assert code == 2 and f"{folder} is not the folder of a run" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["ls", "watch", "save", "stop"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[training", "Expected ']'"),
        ("training = 3", "training is '3', not a table"),
        ("resilience = 4", "resilience is '4', not a table"),
        ("[checkpoint]\nfolder = 3", "checkpoint.folder is '3', not a text"),
        ("[resilience]\nkill_switch_path = 4", "resilience.kill_switch_path is '4', not a text"),
        ("x = " + 10_000 * "[", "it is nested too deeply"),
    ],
)
def test_a_configuration_of_other_kinds_is_damaged(
    verb: str, text: str, problem: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that need it refuse the run; the others show its state all the same."""
    (run / "config.toml").write_text(f"{text}\n")
    words = {"watch": ["--once"], "ls": ["--json"]}.get(verb, [])
    code, output = titan_run(capsys, verb, run, *words)
    assert code == (0 if words else 2) and f"config.toml is damaged: {problem}" in output
    assert ("stopped: lost" in output or '"lost"' in output) == bool(words)


@pytest.mark.parametrize("value", ['"abc"', "[]", "{}", "true", 400 * "9"])
@pytest.mark.parametrize("key", ["step", "time", "n_tokens_seen", "loss", "grad_norm", "lr", "tps"])
def test_a_row_with_a_wrong_value_is_skipped_and_reported(
    key: str, value: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines()[8:10]
    wrong = json.dumps(json.loads(rows[1]) | {key: "VALUE"}).replace('"VALUE"', value)
    (run / "metrics.jsonl").write_text(f"{rows[0]}\n{wrong}\n")
    problem = f"end of metrics.jsonl: skipped 1 of 2 lines ({key} is not a"
    for words in (["ls", run.parent, "--json"], ["watch", run, "--once"]):
        code, text = titan_run(capsys, *words)
        assert code == 0 and problem in text and ("step 9" in text or '"step": 9' in text)


@pytest.mark.parametrize("text", ["[]", "{", '{"reason": "done", "code": "x", "step": 1}'])
def test_a_malformed_exit_json_is_named(
    text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "exit.json").write_text(text)
    code, output = titan_run(capsys, "save", run)
    assert code == 2 and output.startswith(f"{run / 'exit.json'} is malformed: ")
    assert "Expected reason, code and step: remove it" in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", "not a JSON object"),
        ("[" * 10_000, "not a JSON object"),
        ('{"step": 11}', "no time, n_tokens_seen, grad_norm"),
    ],
)
def test_damaged_metrics_are_reported(
    line: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text(f"{line}\n")
    code, text = titan_run(capsys, "watch", run, "--once")
    assert code == 0 and f"skipped 1 of 1 lines ({message}" in text and len(text) < 400
    assert titan_run(capsys, "ls", run)[0] == 0


# ---- ls


def test_ls_lists_the_runs_below_a_folder(run: Path) -> None:
    done = write_run(run.parent / "deeper/done", NOW - 1e6)
    (done / "exit.json").write_text('{"reason": "done", "code": 0, "step": 10}')
    alive = write_run(run.parent / "zeta", NOW - 100)  # no new row, but a heartbeat
    write_heartbeat(alive, 0, step=11, micro_batch=0, seconds=5)
    (run.parent / ".hidden").mkdir()
    write_run(run.parent / ".hidden/run", NOW)
    summaries = {Path(summary.path): summary for summary in list_runs(run.parent, NOW)}
    assert list(summaries) == [run, done, alive]
    assert (summaries[done].state, summaries[done].reason) == ("stopped", "done")
    first = summaries[run]
    assert (first.step, first.total_steps, first.loss, first.checkpoint) == (10, 100, 3.5, 10)
    assert summaries[alive].num_attempts == 2 and summaries[alive].updated == NOW - 5
    assert first.format_row(NOW + 7).split()[1:] == [
        "running", "10/100", "3.5000", "9", "s", "ago", "step-10",
    ]  # fmt: skip


def test_a_run_without_a_step_is_listed(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    (summary,) = list_runs(run, NOW)
    assert (summary.step, summary.loss, summary.total_steps) == (None, None, 100)
    assert "-/100" in summary.format_row(NOW)


def test_ls_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[9])
    (run / "metrics.jsonl").write_text(json.dumps(last | {"loss": "nan"}) + "\n")
    code, text = titan_run(capsys, "ls", run.parent, "--json")
    assert code == 0
    (content,) = json.loads(text)
    assert (content["path"], content["loss"], content["checkpoint"]) == (str(run), "nan", 10)


def test_ls_refuses_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, text = titan_run(capsys, "ls", folder)
        assert code == 2 and text.startswith(f"{folder} contains no run")


def test_ls_takes_half_a_second_without_torch(run: Path) -> None:
    """CPU time of one process, including the start of the interpreter."""
    arguments = [sys.executable, "-X", "importtime", "-m", "torchtitan_like", "run", "ls", str(run)]
    log = run / "imports"
    with log.open("w") as file, open(os.devnull, "w") as null:
        actions = [
            (os.POSIX_SPAWN_DUP2, file.fileno(), 2),
            (os.POSIX_SPAWN_DUP2, null.fileno(), 1),
        ]
        path = {"PYTHONPATH": str(ROOT)}
        child = os.posix_spawn(sys.executable, arguments, os.environ | path, file_actions=actions)
        _, code, usage = os.wait4(child, 0)
    modules = {line.split("|")[-1].strip() for line in log.read_text().splitlines()}
    assert code == 0, log.read_text()
    assert not {"torch", "numpy", "pydantic"} & modules
    assert usage.ru_utime + usage.ru_stime < 0.5


# ---- examples


@pytest.mark.parametrize("verb", ["ls", "watch", "report", "compare", "save", "stop"])
def test_the_example_in_the_help_works(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("outputs", "outputs_a", "outputs_b"):
        write_run(tmp_path / name, NOW)
    monkeypatch.chdir(tmp_path)
    assert main(example_words(f"run {verb}")) == 0
    assert len(capsys.readouterr().out) > 10


# ---- stop, save


def test_requests_reach_the_trainer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    switches = Switches(run, Resilience())
    assert switches.read() == []
    assert titan_run(capsys, "save", run)[0] == 0
    assert titan_run(capsys, "save", run, "--export")[0] == 0
    assert switches.read() == [Request.SAVE, Request.EXPORT]
    assert switches.read() == []
    code, text = titan_run(capsys, "stop", run)
    assert code == 0 and f"titan run stop {run} --clear" in text
    assert "KILL is created: the run saves and ends with code 130." in text
    assert switches.read() == [Request.KILL] == switches.read()
    assert titan_run(capsys, "stop", run, "--clear")[0] == 0
    assert switches.read() == []
    assert titan_run(capsys, "stop", run, "--clear")[0] == 0, (
        "expected success without a file to remove"
    )


def test_switch_paths_are_read_from_the_configuration(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Resilience(kill_switch_path=str(tmp_path / "END"), save_switch_path="NOW")
    with (run / "config.toml").open("a") as file:
        file.write(f'[resilience]\nkill_switch_path = "{tmp_path}/END"\nsave_switch_path = "NOW"\n')
    assert titan_run(capsys, "stop", run)[0] == 0
    assert titan_run(capsys, "save", run)[0] == 0
    assert (tmp_path / "END").exists() and (run / "NOW").exists()
    assert Switches(run, section).read() == [Request.KILL, Request.SAVE]


def test_a_request_that_the_run_would_ignore_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "exit.json").write_text('{"reason": "done", "code": 0, "step": 10}')
    code, text = titan_run(capsys, "save", run)
    assert code == 2 and f"{run} has stopped: done (code 0)" in text
    code, text = titan_run(capsys, "stop", run)
    assert code == 2 and f"{run} has stopped: done (code 0)" in text and not (run / "KILL").exists()
    (run / "exit.json").write_text('{"reason": "requeue", "code": 75, "step": 10}')
    code, text = titan_run(capsys, "stop", run)
    assert code == 0 and "has stopped already, and its next job ends at once. No run starts" in text
    (run / "exit.json").unlink()
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("enable = true", "enable = false"))
    code, text = titan_run(capsys, "save", run, "--export")
    assert code == 2 and "checkpoint.enable is false" in text
    assert not (run / "SAVE").exists() and not (run / "EXPORT").exists()


def test_watch_repeats_until_interrupted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    code, text = titan_run(capsys, "watch", run, "--every", 0.5)
    assert code == 0 and pauses == [0.5] * 3 and text.count("step 10 of 100") == 3
