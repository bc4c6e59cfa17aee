"""Constants are fitted to measured steps, and their error is that of runs that were left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibrate import description_text
from benchmarks.fit_runs import (
    MeasuredRun,
    Sample,
    constants_to_fit,
    fit,
    leave_one_out,
    read_measured,
)
from benchmarks.fit_runs import main as fit_main
from tests.unit.report.run_folder import start_event, step_row, write_rows
from tests.unit.scripts.test_calibrate import CPU
from torchtitan_like.check import load_checked
from torchtitan_like.cli import main as titan
from torchtitan_like.config import JobConfig, dump_toml
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.plan.clusters import Cluster, load_cluster
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.record import Recording
from torchtitan_like.plan.timeline import step_time

DEFAULT = load_cluster("default")
TRUTH = replace(DEFAULT, matmul_factor=0.7, inter_node_gb_s=55)
CONSTANTS = ["matmul_factor", "inter_node_gb_s"]


def work(products: float, messages: float) -> Callable[[Cluster], float]:
    """Return the time of a step with so many seconds on one GPU alone, and at 50 GB/s."""
    return lambda cluster: (
        products / cluster.matmul_factor + messages * 50 / cluster.inter_node_gb_s
    )


def samples(*slower: float) -> list[Sample]:
    """Return steps of several mixes of work on the true cluster. slower: noise, relative."""
    mixes = [work(1.0, 0.2), work(1.0, 1.0), work(0.3, 1.0), work(2.0, 1.5)]
    return [
        Sample(f"run-{index}", mix(TRUTH) * (1 + noise), mix)
        for index, (mix, noise) in enumerate(zip(mixes, slower, strict=False))
    ]


def test_known_constants_are_found() -> None:
    found = fit(samples(0, 0, 0, 0), DEFAULT, CONSTANTS)
    # The prior holds them back a little.
    assert found.matmul_factor == pytest.approx(0.7, rel=0.03)
    assert found.inter_node_gb_s == pytest.approx(55, rel=0.03)
    assert replace(found, matmul_factor=0.8, inter_node_gb_s=50) == DEFAULT


def test_a_constant_is_at_most_its_upper_bound() -> None:
    fast = [each._replace(seconds=each.seconds / 100) for each in samples(0, 0)]
    assert fit(fast, DEFAULT, CONSTANTS[:1]).matmul_factor == 2


def test_a_run_that_differs_has_the_largest_error_when_it_is_left_out() -> None:
    consistent = leave_one_out(samples(0, 0, 0, 0), DEFAULT, CONSTANTS)
    assert max(map(abs, consistent)) < 0.04
    errors = leave_one_out(samples(0, 0, 0, 0.5), DEFAULT, CONSTANTS)
    assert errors[3] == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert max(map(abs, errors)) == abs(errors[3])


def test_one_run_has_no_other_to_be_predicted_from() -> None:
    assert leave_one_out(samples(0), DEFAULT, CONSTANTS[:1]) == []


def run_of(ranks: int, **parallelism: bool) -> MeasuredRun:
    config = JobConfig.model_validate({"parallelism": parallelism})
    run = DryRun(0, ParallelDims(ranks, dp_shard=ranks), Recording(), {})
    return MeasuredRun(Path("run"), 1.0, config, [run])


@pytest.mark.parametrize(
    ("runs", "constants"),
    [
        ([run_of(8)], CONSTANTS[:1]),
        ([run_of(8)] * 5, CONSTANTS[:1]),
        ([run_of(16)], CONSTANTS[:1]),
        ([run_of(8), run_of(16)], CONSTANTS),
        (
            [run_of(8), run_of(16), run_of(8, enable_async_tensor_parallel=True)] * 2,
            ["matmul_factor", "async_tp_hidden"],
        ),
    ],
)
def test_never_more_constants_than_runs_nor_than_two(
    runs: list[MeasuredRun], constants: list[str]
) -> None:
    assert constants_to_fit(runs, DEFAULT) == constants


# ---- run directories

# Slow enough that the time of issuing operators does not matter.
SLOW = replace(CPU, launch_us=0.0, peak_tflops={"float32": 1e-4}, hbm_tb_s=4e-5)
TINY = {"n_layers": 1, "n_heads": 2}


def write_run(
    run: Path, seconds: float, *, dim: int = 32, seq_len: int = 32, gpus: list[str] | None = None
) -> None:
    """Write a run of 20 steps on one rank that logs each fifth step."""
    settings: dict[str, Any] = {"model.flavor": "debugmodel", "training.seq_len": seq_len}
    settings |= {"training.mixed_precision_param": "float32"}
    settings |= {f"model.args.{name}": value for name, value in {**TINY, "dim": dim}.items()}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    config, _ = load_checked(words, None, training=False)
    rows = [step_row(step, 1000.0 + step) for step in range(1, 21)]
    for row in rows[4::5]:
        row["step_s"] = seconds if row["step"] >= 10 else 99.0
    write_rows(run / "metrics.jsonl", rows)
    write_rows(run / "events.jsonl", [start_event(1, 990.0, num_ranks=1)])
    (run / "config.toml").write_text(dump_toml(config))
    facts = run / "attempts/1/environment/facts.json"
    facts.parent.mkdir(parents=True, exist_ok=True)
    facts.write_text(json.dumps({"gpus": gpus} if gpus else {}))


def test_runs_of_a_known_cluster_give_its_constants_and_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("devices").mkdir()
    device = Path("devices/slow.toml")
    device.write_text(description_text(SLOW, "made up"))
    gpu = load_gpu(str(device))
    shapes = [(16, 256), (64, 32)]
    names = [f"run-{dim}" for dim, _ in shapes]
    for name, (dim, seq_len) in zip(names, shapes, strict=True):
        write_run(Path(name), 1.0, dim=dim, seq_len=seq_len)
        read = read_measured(Path(name), gpu)
        assert read.seconds == 1.0
        truth = step_time(read.runs, read.config, gpu, TRUTH).seconds
        write_run(Path(name), truth, dim=dim, seq_len=seq_len)

    fit_main([*names, "-o", "fitted.toml", "--gpu", str(device)])
    out = capsys.readouterr().out
    assert all(name in out for name in names) and "Error band: +-" in out
    cluster = load_cluster("fitted.toml")
    assert cluster.matmul_factor == pytest.approx(0.7, rel=0.08)
    assert cluster.async_tp_hidden == DEFAULT.async_tp_hidden
    assert cluster.fitted_rows == tuple(names)
    assert 1 <= cluster.error_percent <= 5
    assert load_gpu(cluster.gpu) == gpu

    plan = ["plan", "run-64/config.toml", "--world-size", "1", "--cluster", "fitted.toml"]
    assert titan(plan) == 0
    out = capsys.readouterr().out
    assert f"each +-{cluster.error_percent:g} %" in out
    assert "the largest error of 2 runs, each predicted from the others" in out
    assert "unvalidated" in out


def test_one_run_keeps_the_band_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.toml").write_text(description_text(SLOW, "made up"))
    write_run(Path("one"), 0.1)
    fit_main("one -o f.toml --gpu slow.toml".split())
    assert "matmul_factor = " in capsys.readouterr().out
    fitted = load_cluster("f.toml")
    assert fitted.error_percent == DEFAULT.error_percent
    assert "one run has no other" in fitted.error_source
    assert fitted.inter_node_gb_s == DEFAULT.inter_node_gb_s


def test_runs_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.toml").write_text(description_text(SLOW, "made up"))
    write_run(Path("gpus"), 1.0, gpus=["NVIDIA H100"])
    write_run(Path("short"), 1.0)
    rows = [step_row(step, 1000.0 + step, step_s=1.0) for step in range(1, 9)]
    write_rows(Path("short/metrics.jsonl"), rows)
    write_run(Path("broken"), 1.0)
    Path("broken/config.toml").write_text("[model]\nflavour = 1\n")
    for name, message in (
        ("gpus", "gpus was trained on GPUs. Expected CPUs, as slow describes"),
        ("short", "short has no steady step. Expected a log line after step 10"),
        ("broken", "model.flavour"),
    ):
        with pytest.raises(SystemExit) as ended:
            fit_main([name, "-o", "f.toml", "--gpu", "slow.toml"])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert not Path("f.toml").exists()
