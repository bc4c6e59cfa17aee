"""`titan bench`: the list of runs, what happens around a run, and the numbers of the results."""

from __future__ import annotations

import csv
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.report.run_folder import (
    event,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from torchtitan_like import cli
from torchtitan_like.bench import execution, results
from torchtitan_like.bench.run_list import (
    BenchRun,
    list_overrides,
    list_runs_of_bench,
    parse_vary,
    run_name,
)
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.report.history import build_history
from torchtitan_like.report.page import render_page
from torchtitan_like.report.recorded import read_run
from torchtitan_like.resilience.agreement import Request
from torchtitan_like.util.exit_codes import LAUNCHER_SIGNALS, ExitCode
from torchtitan_like.util.run_directory import RunEnd, write_exit

# ---- the list of runs


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("optimizer.lr=1e-3,2e-3", "optimizer.lr", ["1e-3", "2e-3"]),
        ("training.local-batch-size=4", "training.local_batch_size", ["4"]),
        ("--training.steps=4,8", "training.steps", ["4", "8"]),
        ("model.converters=;quantize.linear.float8,x", "model.converters", ["", "quantize.linear.float8,x"]),
        ("data.web.path=a=b,c", "data.web.path", ["a=b", "c"]),
        ("training.batch_ramp=[2,2,8],[4,4,8]", "training.batch_ramp", ["[2,2,8]", "[4,4,8]"]),
    ],
)  # fmt: skip
def test_values_of_a_setting_are_parsed(text: str, key: str, values: list[str]) -> None:
    assert parse_vary(text) == (key, values)


def test_each_setting_is_varied_against_the_base_or_in_all_combinations() -> None:
    varied = [parse_vary("optimizer.lr=1,2"), parse_vary("training.steps=8")]
    assert list_overrides(varied, is_grid=False) == [
        {}, {"optimizer.lr": "1"}, {"optimizer.lr": "2"}, {"training.steps": "8"},
    ]  # fmt: skip
    assert list_overrides(varied, is_grid=True) == [
        {"optimizer.lr": "1", "training.steps": "8"},
        {"optimizer.lr": "2", "training.steps": "8"},
    ]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "base"),
        ({"optimizer.lr": "1e-3", "training.steps": "8"}, "lr=1e-3,steps=8"),
        ({"training.steps": "8", "validation.steps": "4"}, "training.steps=8,validation.steps=4"),
        ({"training.dataset_path": "../a/b c"}, "dataset_path=..-a-b-c-9e99316b"),
        ({"job.description": "x" * 200}, f"description={'x' * 88}-0ab8d79d"),
    ],
)
def test_names_of_variants_are_names_of_folders(overrides: dict[str, str], name: str) -> None:
    assert run_name(overrides, list(overrides)) == name


def bench_runs(folder: Path, *vary: str, repeats: int = 1, **options: bool) -> list[BenchRun]:
    settings = ["--job.config_file=debug_model.toml", f"--job.dump_folder={folder}"]
    runs, _ = list_runs_of_bench(settings, vary, repeats, 1, "cpu", **{"is_grid": False, **options})
    return runs


def test_repeats_have_the_next_seeds_and_equal_variants_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = bench_runs(tmp_path, "optimizer.lr=8e-4,1e-3,0.001", repeats=2)
    names = ["base,seed=42", "lr=1e-3,seed=42", "base,seed=43", "lr=1e-3,seed=43"]
    assert [(run.index, run.name) for run in runs] == list(enumerate(names))
    last = runs[-1]
    assert last.argv[-2:] == ["--debug.seed=43", f"--job.dump_folder={tmp_path}/lr=1e-3,seed=43"]
    assert (last.config.debug.seed, last.config.optimizer.lr) == (43, 1e-3)
    lines = capsys.readouterr().err.splitlines()
    assert "lr=8e-4 is left out: its settings are those of base" in lines
    assert "lr=0.001 is left out: its settings are those of lr=1e-3" in lines


def test_all_problems_of_all_runs_are_reported_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execution, "launch", launch_returning({}, []))
    code = cli.main(
        ["bench", "debug_model.toml", "--vary", "optimizer.lr=fast,1e-3,1e-4", "--vary",
         "training.stesp=1", "--vary", "parallelism.tensor_parallel_degree=1,3",
         "--model.flavor", "9B", "--job.dump_folder", str(tmp_path / "bench")]
    )  # fmt: skip
    assert code == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert 'in lr=fast: optimizer.lr = "fast": expected a number' in message
    assert 'in stesp=1: training.stesp = "1": expected a known setting' in message
    assert "in tensor_parallel_degree=3: parallelism" in message
    assert message.count('model.flavor = "9B"') == 1 and not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["debug_model.toml", "--vary", "optimizer.lr"], "expected KEY=VALUE,VALUE"),
        (["debug_model.toml", "--vary", "debug.seed=1,2"], "debug.seed: expected another key"),
        (["debug_model.toml", *("--vary", "training.steps=1") * 2], "training.steps: expected one"),
        (["debug_model.toml", "--array-index", "1"], "--array-index 1: expected an index of the 1"),
        (["debug_model.toml", "--plan", "abacus"], "abacus"),
        (["debug_model.toml", "--vary", "training.steps=1", "--checkpoint.folder", "/tmp/ck"],
         "a folder below that of each run"),
        ([], "CONFIG is missing"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(execution, "launch", launch_returning({}, []))
    code = cli.main(["bench", *words, "--job.dump_folder", str(tmp_path / "bench")])
    assert code in (2, ExitCode.BAD_CONFIG)
    assert message in capsys.readouterr().err and not (tmp_path / "bench").exists()


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    (run,) = bench_runs(tmp_path)
    write_steady_run(run.folder)
    with pytest.raises(ConfigError, match=r"training.steps was 20, is 200"):
        bench_runs(tmp_path)
    write_steady_run(tmp_path)
    with pytest.raises(ConfigError, match="expected a folder that is no run"):
        bench_runs(tmp_path)


# ---- around a run

Launch = Callable[..., int]


def launch_returning(codes: dict[str, int], started: list[str]) -> Launch:
    """A launcher that writes exit.json with a code, and ignores signals afterwards, as it does."""

    def launch(_options: object, argv: Sequence[str], _words: object) -> int:
        assert "--job.show_results=false" in argv
        folder = Path(argv[-1].partition("=")[2])
        started.append(folder.name)
        code = ExitCode(codes.get(folder.name, 0))
        folder.mkdir(parents=True, exist_ok=True)
        write_exit(folder, RunEnd(code.reason, int(code), 1))
        for signum in LAUNCHER_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        return int(code)

    return launch


def test_a_bench_continues_after_a_failed_run_and_ends_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(signum) for signum in LAUNCHER_SIGNALS]
    started: list[str] = []
    words = ["bench", "debug_model.toml", "--vary", "optimizer.lr=1,2,3", "--job.dump_folder"]
    codes = {"lr=1,seed=42": 70, "lr=2,seed=42": 130}
    monkeypatch.setattr(execution, "launch", launch_returning(codes, started))
    assert cli.main([*words, str(tmp_path)]) == ExitCode.INTERRUPTED
    assert started == ["base,seed=42", "lr=1,seed=42", "lr=2,seed=42"]
    assert [signal.getsignal(signum) for signum in LAUNCHER_SIGNALS] == handlers
    assert not (tmp_path / "bench.csv").exists()

    started.clear()
    codes["lr=2,seed=42"] = 0
    assert cli.main([*words, str(tmp_path)]) == ExitCode.BAD_NUMBERS
    assert started == ["lr=1,seed=42", "lr=2,seed=42", "lr=3,seed=42"]
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["state"], row["exit_code"]) for row in rows] == [
        ("done", "0"), ("bad_numbers", "70"), ("done", "0"), ("done", "0"),
    ]  # fmt: skip
    assert "non-finite" in rows[1]["cause"] and rows[1]["optimizer.lr"] == "1.0"


@pytest.mark.parametrize(
    ("code", "cause", "is_stopped"),
    [
        (130, Request.KILL, False),
        (130, Request.INTERRUPT, True),
        (75, Request.HOST_MEMORY, False),
        (75, Request.GPU_MEMORY, False),
        (75, Request.DEADLINE, True),
    ],
)
def test_a_run_that_ends_alone_does_not_end_the_bench(
    code: int, cause: Request, is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    end = launch_returning({"base,seed=42": code}, started)

    def launch(options: object, argv: Sequence[str], words: object) -> int:
        folder = Path(argv[-1].partition("=")[2])
        write_rows(folder / "events.jsonl", [event("stop", time.time(), cause=cause.name.lower())])
        return end(options, argv, words)

    monkeypatch.setattr(execution, "launch", launch)
    words = ["bench", "debug_model.toml", "--vary", "optimizer.lr=1", "--job.dump_folder"]
    assert cli.main([*words, str(tmp_path)]) == code
    assert started == ["base,seed=42", "lr=1,seed=42"][: 1 if is_stopped else 2]


def test_a_cause_of_an_earlier_attempt_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was stopped alone, and Ctrl-C ended its next attempt before the first step."""
    started: list[str] = []
    earlier = event("stop", time.time() - 60, cause="kill")
    write_rows(tmp_path / "base,seed=42/events.jsonl", [earlier])
    monkeypatch.setattr(execution, "launch", launch_returning({"base,seed=42": 130}, started))
    words = ["bench", "debug_model.toml", "--vary", "optimizer.lr=1", "--job.dump_folder"]
    assert cli.main([*words, str(tmp_path)]) == 130
    assert started == ["base,seed=42"]


def test_all_runs_have_the_same_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(execution, "launch", launch_returning({}, started))
    write_rows(tmp_path / "base,seed=42/events.jsonl", [event("start", 1.0, num_ranks=2)])
    words = ["bench", "debug_model.toml", "--repeat", "2", "--job.dump_folder", str(tmp_path)]
    assert cli.main([*words, "--nproc", "1"]) == 2
    assert "base,seed=42 ran on 2 ranks, now there are 1" in capsys.readouterr().err
    assert cli.main([*words, "--nproc", "1", "--collect"]) == 1 and not started
    assert cli.main([*words, "--nproc", "2"]) == 0 and len(started) == 2


def test_a_task_of_an_array_runs_one_run_and_a_last_call_collects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    words = ["bench", "debug_model.toml", "--vary", "optimizer.lr=1", "--job.dump_folder"]
    words += [str(tmp_path)]
    monkeypatch.setattr(execution, "launch", launch_returning({}, started))
    assert cli.main([*words, "--collect"]) == 1  # before any run
    (tmp_path / "bench.csv").unlink()
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert cli.main(words) == 0
    assert started == ["lr=1,seed=42"] and not (tmp_path / "bench.csv").exists()
    assert cli.main([*words, "--collect"]) == 1  # the base is not started
    assert cli.main([*words, "--array-index", "0"]) == 0
    assert cli.main([*words, "--collect"]) == 0
    assert started == ["lr=1,seed=42", "base,seed=42"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "")
    assert cli.main(words) == 0


# ---- the numbers


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (10, 2.2281), (11, 2.2010), (30, 2.0423), (1000, 1.9623)],
)
def test_quantiles_of_students_t(degrees: int, expected: float) -> None:
    assert results.t_quantile(degrees) == pytest.approx(expected, abs=2e-4)


def test_confidence_intervals() -> None:
    spread = results.interval([1.0, 2.0, 3.0])
    assert spread == pytest.approx((2.0, 4.3027 * 1.0 / math.sqrt(3)))
    assert str(spread) == "2.0000 ± 2.5"
    assert results.interval([5.0]) == (5.0, None) and str(results.interval([5.0])) == "5.0000"
    changes = results.difference({1: 2.0, 2: 3.5, 3: 9.0}, {1: 1.0, 2: 2.0, 4: 0.0})
    assert changes == results.interval([1.0, 1.5])
    assert results.difference({1: 2.0}, {2: 1.0}) is None


def test_pauses_and_starts_are_no_time_of_steps(tmp_path: Path) -> None:
    """Attempt 3 starts minutes after attempt 1; its own steps take 2 s, 2 s, 7 s and 22 s."""
    history = build_history(read_run(write_killed_run(tmp_path)))
    assert results.step_seconds_so_far(history).tolist() == [2, 4, 6, 8, 10, 12, 19, 41]


def test_runs_are_compared_at_the_end_of_the_shortest_one_that_is_done(tmp_path: Path) -> None:
    runs = []
    for index, (num_steps, code) in enumerate([(40, 0), (20, 0), (5, 70)]):
        folder = write_steady_run(tmp_path / f"run{index}", num_steps)
        end = ExitCode(code)
        write_exit(folder, RunEnd(end.reason, code, num_steps))
        config = JobConfig.model_validate(
            {"job": {"dump_folder": str(folder)}, "training": {"steps": 40}}
        )
        runs.append(BenchRun(index, "base" if index < 2 else "lr=1", index, config, []))
    config = JobConfig.model_validate({"job": {"dump_folder": str(tmp_path / "none")}})
    runs.append(BenchRun(3, "lr=1", 3, config, []))
    rows, histories = results.collect(runs, ["optimizer.lr"], {0: 74, 3: 74})
    assert [row["state"] for row in rows] == ["done", "done", "bad_numbers", "not started"]
    assert [row["exit_code"] for row in rows] == [0, 0, 70, 74]
    # Losses are 8 - 0.01 x step: the mean of steps 11 to 20.
    losses = [row.get("loss_at_equal_tokens") for row in rows]
    assert losses == [pytest.approx(7.845), pytest.approx(7.845), None, None]
    assert rows[0]["equal_tokens"] == 20 * 64 and rows[0]["equal_seconds"] == 40
    assert rows[1]["loss_at_equal_tokens_ci95"] == pytest.approx(0) and "tps_mean" not in rows[1]
    assert results.exit_code(rows) == 70

    table = results.table_of(rows, ["optimizer.lr"])
    assert [line[2] for line in table.rows] == [
        "2 of 2 done, its data ended at step 20 of 40",
        "0 of 2 done, bad_numbers, not started",
    ]
    column = table.head.index("loss at equal tokens")
    assert table.rows[0][column] == "7.8450 ± 0" and "Student" in table.note
    assert "1,280 tokens" in table.note and "40.0 s" in table.note
    page = render_page(histories, is_redacted=False, table=table)
    assert "7.8450 ± 0" in page and "t · s / √n" in page and "run2: train" in page


def test_a_variant_is_compared_with_the_base_at_equal_seeds() -> None:
    """The losses differ much between seeds, and their differences do not."""
    losses = {"base": [2.0, 3.0, 4.0], "lr=1": [2.1, 3.1, 4.1], "lr=2": [1.0]}
    rows: list[results.Row] = [
        {"variant": variant, "seed": seed, "state": "done", "cause": "", "validation_loss": loss}
        for variant, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    table = results.table_of(rows, [])
    assert table.head[-1] == "validation loss, difference to base"
    assert [line[-1] for line in table.rows][:1] == ["–"]
    assert [line[-1].split()[0] for line in table.rows][1:] == ["0.1000", "-1.0000"]
    assert float(table.rows[1][-1].split()[-1]) < 1e-12


def test_runs_of_one_row_have_no_loss_at_equal_time(tmp_path: Path) -> None:
    folder = write_steady_run(tmp_path / "run", 1)
    write_exit(folder, RunEnd("done", 0, 1))
    config = JobConfig.model_validate({"job": {"dump_folder": str(folder)}})
    rows, _ = results.collect([BenchRun(0, "base", 0, config, [])], [], {})
    assert "equal_seconds" not in rows[0]
    assert results.table_of(rows, []).rows


def test_a_damaged_row_is_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(1, 10.0)])
    history = build_history(read_run(tmp_path))
    assert results.step_seconds_so_far(history).tolist() == [0.0]
