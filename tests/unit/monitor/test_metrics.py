"""The rows, the log lines and the scalars of a run with a fake clock."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runner import ROOT
from tests.unit.monitor.conftest import Clock
from torchtitan_like.monitor.metrics import Metrics
from torchtitan_like.monitor.reference_curve import ReferenceCurve
from torchtitan_like.monitor.rows import StepRecord
from torchtitan_like.monitor.sinks import Dashboard
from torchtitan_like.util.jsonl import read_rows

EXACT_KEYS = [
    "step", "n_tokens_seen", "num_valid_tokens", "loss", "max_loss",
    "grad_norm", "lr", "data_digest", "data_digest_chain", "skipped",
]  # fmt: skip
TOKENS = 1000
LOADS: dict[str, Any] = {
    "choices": [[2, 2], [3, 1]],
    "router_z": [1.0, 2.0],
    "aux_loss": None,
    "bias_range": None,
}


class Scalars(Dashboard):
    """A dashboard that collects its scalars in a dictionary."""

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}

    def write(self, step: int, scalars: Any) -> None:
        self.written.setdefault(step, {}).update(scalars)

    def close(self) -> None:
        self.written["closed"] = {}  # type: ignore[index]


def record(
    step: int, share: float = 0.0, *, local: int = 900, valid: int = 900, **changes: Any
) -> StepRecord:
    arguments: dict[str, Any] = {
        "step": step,
        "num_tokens": TOKENS,
        "num_valid_tokens": valid,
        "local_valid_tokens": local,
        "loss_share": torch.tensor(share or 1 / (step + 2)),
        "grad_norm": torch.tensor(0.1 * step),
        "skipped": torch.tensor(0.0),
        "lr": 1e-3 / step,
        "data_digest": (step * 0x9E3779B97F4A7C15) % 2**64,
        "data_digest_chain": step,
        "data_loading_s": 0.0,
    } | changes
    return StepRecord(**arguments)


def run(metrics: Metrics, clock: Clock, steps: range, seconds: float = 1.0, **changes: Any) -> None:
    for step in steps:
        clock.now += seconds
        metrics.record(record(step, **changes))
        if metrics.due(step):
            metrics.log(step)


# ---- rows


def test_one_row_per_step_for_any_log_freq(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    run(build(log_freq=4, total_steps=10), clock, range(1, 11))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row in rows:
        assert list(row)[: len(EXACT_KEYS)] == EXACT_KEYS
        assert {"time", "data_loading_s"} <= set(row)
        assert ("tps" in row) == (row["step"] in (1, 4, 8, 10))
    assert [row["n_tokens_seen"] for row in rows] == [TOKENS * step for step in range(1, 11)]
    assert (
        rows[0]["data_digest"] == "9e3779b97f4a7c15"
        and rows[0]["data_digest_chain"] == "0000000000000001"
    )


def test_rows_have_the_loss_and_the_labels_of_each_source(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    """Rank 1 has twice the losses and labels of rank 0. A source without labels has no loss."""
    sink = Scalars()
    metrics = build(
        gather=lambda local: torch.stack([local, local * 2]), sources=["a", "b"], total_steps=2
    )
    metrics.sinks = [sink]
    for step, counts in ((1, [3, 1]), (2, [4, 0])):
        losses = torch.tensor([6.0, float(counts[1])], dtype=torch.float64)
        run(
            metrics,
            clock,
            range(step, step + 1),
            local_valid_by_source=counts,
            loss_by_source=losses,
        )
    first, second = (row["sources"] for row in read_rows(tmp_path / "metrics.jsonl"))
    assert first == {
        "a": {"loss": 2.0, "num_valid_tokens": 9},
        "b": {"loss": 1.0, "num_valid_tokens": 3},
    }
    assert second == {
        "a": {"loss": 1.5, "num_valid_tokens": 12},
        "b": {"loss": None, "num_valid_tokens": 0},
    }
    names_by_step = {
        step: sorted(name for name in scalars if "avg_loss" in name)
        for step, scalars in sink.written.items()
    }
    names = ["loss_metrics/a/avg_loss", "loss_metrics/b/avg_loss", "loss_metrics/global_avg_loss"]
    assert names_by_step == {1: names, 2: [names[0], names[2]]}


def test_the_loss_of_multi_token_prediction_is_the_global_mean(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    """Rank 1 has twice the losses of rank 0. The losses of sources are unchanged."""
    for sources in ([], ["a"]):
        sink = Scalars()
        metrics = build(
            gather=lambda local: torch.stack([local, local * 2]),
            sources=sources,
            total_steps=1,
            folder=tmp_path / str(sources),
        )
        metrics.sinks = [sink]
        changes: dict[str, Any] = {"mtp_loss_share": torch.tensor(0.5)}
        if sources:
            changes |= {"local_valid_by_source": [4], "loss_by_source": torch.tensor([6.0])}
        run(metrics, clock, range(1, 2), **changes)
        (row,) = read_rows(tmp_path / str(sources) / "metrics.jsonl")
        assert row["mtp_loss"] == sink.written[1]["loss_metrics/global_avg_mtp_loss"] == 1.5
        assert row.get("sources") == (
            {"a": {"loss": 1.5, "num_valid_tokens": 12}} if sources else None
        )


def test_exact_values_do_not_depend_on_buffering(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    """The sum over 7 ranks depends on the order of summation, in float32 and in float64."""
    generator = torch.Generator().manual_seed(0)
    others = torch.rand(13, 6, generator=generator, dtype=torch.float64) * 10 ** torch.arange(
        -6.0, 0.0
    )

    def exact_values(name: str, log_freq: int) -> list[list[str]]:
        num_gathered = 0

        def gather(local: torch.Tensor) -> torch.Tensor:
            nonlocal num_gathered
            rows = others[num_gathered : num_gathered + len(local)]
            num_gathered += len(local)
            return torch.cat([local[None], torch.stack([rows, rows * 7], dim=-1).transpose(0, 1)])

        metrics = build(log_freq=log_freq, gather=gather, folder=tmp_path / name, total_steps=13)
        run(metrics, clock, range(1, 14))
        rows = read_rows(tmp_path / name / "metrics.jsonl")
        return [
            [v.hex() if isinstance(v, float) else str(v) for v in (row[key] for key in EXACT_KEYS)]
            for row in rows
        ]

    each_step = exact_values("each_step", 1)
    assert each_step == exact_values("every_5", 5) == exact_values("last_step", 13)


def test_loss_is_the_global_mean_and_max_loss_the_largest_mean_of_a_rank(
    build: Callable[..., Metrics],
) -> None:
    """Token losses sum to 6 on rank 0 (3 labels) and 4 on rank 1 (1 label); the mean is 2.5."""
    metrics = build(
        gather=lambda local: torch.stack([local, torch.tensor([[4 / 4, 4.0]], dtype=torch.float64)])
    )
    metrics.record(record(1, share=6 / 4, local=3, valid=4))
    row = metrics.log(1)
    assert (row["loss"], row["max_loss"]) == (2.5, 4.0)
    metrics.record(record(2, share=24 / 4, local=3, valid=4))
    assert metrics.log(2)["max_loss"] == 8.0, "the mean of rank 0 is 24 / 3"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_copied_exactly(
    dtype: torch.dtype, build: Callable[..., Metrics], tmp_path: Path
) -> None:
    value = torch.tensor(math.pi, dtype=dtype)
    metrics = build()
    metrics.record(record(1, loss_share=value, grad_norm=value))
    metrics.log(1)
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["loss"].hex() == row["grad_norm"].hex() == value.item().hex()


@pytest.mark.parametrize(
    ("shares", "num_labels", "loss", "max_loss"),
    [
        ([0.5, 0.0], [4, 0], 0.5, 1.0),  # a rank without labels
        ([0.0, 0.0], [0, 0], None, None),  # no labels anywhere
        ([math.nan, 1.0], [4, 4], math.nan, math.nan),
        ([1.0, math.nan], [4, 4], math.nan, math.nan),
        ([math.inf, 1.0], [4, 4], math.inf, math.inf),
        ([math.inf, -math.inf], [4, 4], math.nan, math.inf),
    ],
)
def test_losses_without_labels_or_finite_values(
    shares: list[float],
    num_labels: list[int],
    loss: float | None,
    max_loss: float | None,
    build: Callable[..., Metrics],
    tmp_path: Path,
) -> None:
    sent: list[torch.Tensor] = []
    for rank in (1, 0):
        metrics = build(
            gather=lambda local: sent.append(local) or torch.stack(sent[::-1]), rank=rank
        )
        metrics.record(
            record(
                1,
                local=num_labels[rank],
                valid=8 if any(num_labels) else 0,
                loss_share=torch.tensor(shares[rank], dtype=torch.float64),
            )
        )
        row = metrics.log(1)
    assert repr((row["loss"], row["max_loss"])) == repr((loss, max_loss))
    assert repr(read_rows(tmp_path / "metrics.jsonl")[0]["loss"]) == repr(loss)


def test_values_stay_on_the_device_until_the_log_step(build: Callable[..., Metrics]) -> None:
    """The test uses tensors that raise if the host reads them before ``log``."""
    allowed = False

    class Guarded(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert allowed or func.__name__ in ("detach", "__get__"), (
                f"{func.__name__} before the log step"
            )
            return super().__torch_function__(func, types, args, kwargs or {})

    metrics = build()
    for step in (1, 2, 3):
        values = {
            key: torch.tensor(float(step)).as_subclass(Guarded)
            for key in ("loss_share", "grad_norm", "skipped")
        }
        metrics.record(record(step, **values))
    allowed = True
    assert metrics.log(3)["grad_norm"] == 3.0


def test_the_graph_of_the_loss_is_released(build: Callable[..., Metrics]) -> None:
    metrics = build()
    metrics.record(record(1, loss_share=(torch.ones((), requires_grad=True) * 2)))
    assert metrics.log(1)["loss"] == 2.0
    assert metrics.rows._pending == []
    metrics.record(record(2, loss_share=(torch.ones((), requires_grad=True) * 2)))
    assert not metrics.rows._pending[0].record.loss_share.requires_grad


def test_skipped_steps_are_marked_and_keep_their_position(
    build: Callable[..., Metrics], tmp_path: Path
) -> None:
    metrics = build(log_freq=5)
    for step in range(1, 6):
        metrics.record(record(step, skipped=torch.tensor(step in (2, 4)), position=10 * step))
    metrics.log(5)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 1, 0, 1, 0]
    assert [row.get("position") for row in rows] == [None, 20, None, 40, None]


def test_a_skipped_step_keeps_the_mean_loss_of_each_data_rank(
    build: Callable[..., Metrics],
) -> None:
    """Of the three ranks, rank 1 has a nan loss and rank 2 has no labels."""
    others = torch.tensor([[[torch.nan, torch.nan]], [[0.0, -torch.inf]]], dtype=torch.float64)
    metrics = build(gather=lambda rows: torch.cat([rows[None], others]))
    metrics.record(record(1, 0.5, local=450, skipped=torch.tensor(1.0)))
    assert str(metrics.log(1)["rank_losses"]) == "{'0': 1.0, '1': nan, '2': None}"


# ---- documentation


def documented_keys(header: str) -> dict[str, str]:
    """Map each key in the table with this header in metrics.md to the second cell of its row."""
    lines = (
        (ROOT / "docs/reference/metrics.md").read_text().partition(f"\n{header}\n")[2].splitlines()
    )
    table = takewhile(lambda line: line.startswith("|"), lines[1:])
    rows = [line.split("|")[1:3] for line in table]
    return {key: cell.strip() for keys, cell in rows for key in re.findall("`(.+?)`", keys)}


def test_every_key_of_a_row_is_documented_and_written(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    exact = documented_keys("| EXACT key | meaning |")
    measured = documented_keys("| MEASURED key | rows | meaning |")
    assert set(measured.values()) == {"all", "log steps", "skipped steps"}
    metrics = build(log_freq=4, sources=["web"], peak_flops=1e12)
    by_source = {"local_valid_by_source": [900], "loss_by_source": torch.tensor([9.0])}
    by_source["mtp_loss_share"] = torch.tensor(2.5)
    by_source["group_lr"] = {"head": 1e-3}
    for step in range(1, 5):
        clock.now += 1.0
        metrics.record(record(step, skipped=torch.tensor(float(step in (2, 4))), **by_source))
        if metrics.due(step):
            metrics.log(step, LOADS)
    kinds = [["log steps"], ["skipped steps"], [], ["log steps", "skipped steps"]]
    for row, kind in zip(read_rows(tmp_path / "metrics.jsonl"), kinds, strict=True):
        in_row = {key for key, rows in measured.items() if rows in ("all", *kind)}
        assert row.keys() == exact.keys() | in_row, row["step"]


def test_every_metric_of_experts_is_documented_and_computed(build: Callable[..., Metrics]) -> None:
    documented = documented_keys("| key of `moe` | rows | meaning |")
    kinds = {"losses": {"aux_loss": [1.0, 1.5]}, "biases": {"bias_range": [0.0, 0.1]}}
    for kind, extra in kinds.items():
        sink = Scalars()
        metrics = build(total_steps=1)
        metrics.sinks = [sink]
        metrics.record(record(1))
        row = metrics.log(1, LOADS | extra)["moe"]
        assert row.keys() == {key for key, rows in documented.items() if rows in ("all", kind)}
        scalars = {name[4:] for name in sink.written[1] if name.startswith("moe/")}
        assert scalars == row.keys() - {"max_violation_by_layer"}


def test_every_key_of_a_validation_row_is_documented_and_written(
    build: Callable[..., Metrics], clock: Clock
) -> None:
    metrics = build(reference=ReferenceCurve({1: {0: 1.5}}, "web"))
    row = metrics.validation(10, 1.0, bits_per_byte=1.5, num_tokens=10, seconds=1.0, dataset="web")
    assert row.keys() == documented_keys("| key | meaning |").keys()


# ---- log steps and flushes


@pytest.mark.parametrize(
    ("log_freq", "due"),
    [(1, list(range(1, 13))), (5, [1, 5, 10, 12]), (12, [1, 12]), (100, [1, 12])],
)
def test_log_steps_are_the_first_the_last_and_multiples_of_log_freq(
    log_freq: int, due: list[int], build: Callable[..., Metrics]
) -> None:
    metrics = build(log_freq=log_freq, total_steps=12)
    assert [step for step in range(1, 13) if metrics.due(step)] == due


def test_flush_writes_rows_and_does_not_end_the_interval(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(log_freq=10)
    run(metrics, clock, range(1, 8), seconds=2.0)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        metrics.flush(7)
    assert not caplog.records
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 7
    assert metrics.byte_offset(7) == (tmp_path / "metrics.jsonl").stat().st_size
    run(metrics, clock, range(8, 11), seconds=2.0)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) == 10 and rows[-1]["step_s"] == 2.0 and rows[-1]["tps"] == TOKENS / 2.0


def test_log_right_after_flush_still_prints(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build()
    clock.now += 1
    metrics.record(record(1))
    metrics.flush(1)
    with caplog.at_level(logging.INFO):
        assert metrics.log(1)["tps"] == TOKENS
    assert "step:  1" in caplog.text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_other_ranks_write_no_files(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    metrics = build(rank=1)
    metrics.rewind(0)
    run(metrics, clock, range(1, 11))
    metrics.flush(10)
    metrics.validation(10, 1.0, None, 10, 1.0)
    assert list(tmp_path.iterdir()) == [] and metrics.byte_offset(10) == 0


# ---- throughput


@pytest.mark.parametrize(
    ("world_size", "tps"),
    [(1, 500.0), (4, 125.0)],  # per device, for any mix of dp, cp, tp and pp
)
def test_tps_is_per_device(
    world_size: int, tps: float, build: Callable[..., Metrics], clock: Clock
) -> None:
    metrics = build(log_freq=2, world_size=world_size, peak_flops=1e12, num_passes=4)
    run(metrics, clock, range(1, 4), seconds=2.0)
    clock.now += 2.0
    metrics.record(record(4))
    row = metrics.log(4)
    assert row["tps"] == pytest.approx(tps)
    assert row["tflops"] == pytest.approx(2e9 * tps / 1e12)
    assert row["mfu"] == pytest.approx(100 * 2e9 * tps / 1e12)
    assert row["hfu"] == pytest.approx(row["mfu"] * 4 / 3)


@pytest.mark.parametrize(("log_freq", "first", "logged"), [(10, 8, 10), (10, 1, 10), (4, 9, 12)])
def test_step_time_counts_only_the_steps_of_this_process(
    log_freq: int,
    first: int,
    logged: int,
    build: Callable[..., Metrics],
    clock: Clock,
    tmp_path: Path,
) -> None:
    """After a resume, the first interval is shorter than log_freq and its first step compiles."""
    metrics = build(log_freq=log_freq)
    run(metrics, clock, range(first, first + 1), seconds=50.0)
    run(metrics, clock, range(first + 1, logged + 1), seconds=0.5)
    row = next(row for row in read_rows(tmp_path / "metrics.jsonl") if row["step"] == logged)
    assert row["step_s"] == pytest.approx(0.5)
    assert row["tps"] == pytest.approx(TOKENS / 0.5)


def test_the_first_step_is_measured_if_it_is_the_only_one(
    build: Callable[..., Metrics], clock: Clock
) -> None:
    metrics = build()
    clock.now += 50.0
    metrics.record(record(1))
    assert metrics.log(1)["step_s"] == 50.0


def test_step_time_includes_logging(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    """The first log step is excluded, because it imports the packages of the sinks."""
    metrics, sink = build(log_freq=2), Scalars()
    sink.write = lambda step, scalars: setattr(
        clock, "now", clock.now + (7.0 if step == 1 else 0.5)
    )
    metrics.sinks = [sink]
    run(metrics, clock, range(1, 7))
    assert [row["step_s"] for row in read_rows(tmp_path / "metrics.jsonl") if "step_s" in row] == [
        1,
        1,
        1.25,
        1.25,
    ]


@pytest.mark.parametrize("pause_after", [1, 2, 3])
def test_step_time_excludes_pauses(
    pause_after: int, build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    metrics = build(log_freq=4)
    for step in range(1, 5):
        clock.now += 1.0
        metrics.record(record(step))
        if metrics.due(step):
            metrics.log(step)
        with metrics.throughput.pause() if step == pause_after else nullcontext():
            clock.now += 1000.0 * (step == pause_after)
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step_s"] == pytest.approx(1.0)


def test_step_time_excludes_a_pause_that_raises(
    build: Callable[..., Metrics], clock: Clock
) -> None:
    metrics = build()
    with pytest.raises(OSError), metrics.throughput.pause():
        clock.now += 5.0
        raise OSError
    clock.now += 1.0
    metrics.record(record(1))
    assert metrics.log(1)["step_s"] == 1.0


def test_data_loading_has_a_mean_and_a_percentage(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    metrics = build(log_freq=4)
    sink = Scalars()
    metrics.sinks.append(sink)
    run(metrics, clock, range(1, 5), seconds=2.0, data_loading_s=0.1)
    assert sink.written[4]["time_metrics/data_loading(s)"] == pytest.approx(0.1)
    assert sink.written[4]["time_metrics/data_loading(%)"] == pytest.approx(5.0)
    assert [row["data_loading_s"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.1] * 4


def test_each_start_of_slow_data_loading_causes_a_warning(
    build: Callable[..., Metrics], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(log_freq=1, alarm=0.25)
    waits = [0.9, 0.2, 0.3, 0.4, 0.1, 0.5]  # the first step fills the pipeline: no warning
    with caplog.at_level(logging.WARNING):
        for step, wait in enumerate(waits, start=1):
            run(metrics, clock, range(step, step + 1), data_loading_s=wait)
    alarms = [entry.getMessage() for entry in caplog.records]
    assert [alarm.split("%")[0] for alarm in alarms] == [
        "Waiting for data took 30",
        "Waiting for data took 50",
    ]
    assert "must take no longer" in alarms[0] and "metrics.data_loading_alarm" in alarms[0]


def test_mfu_above_100_percent_causes_one_warning(
    build: Callable[..., Metrics], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(log_freq=1, peak_flops=1e11)
    run(metrics, clock, range(1, 4))
    assert sum("MFU is 2000.0%" in message for message in caplog.messages) == 1


# ---- console and scalars


@pytest.mark.parametrize(
    ("peak", "loss", "line"),
    [
        (None, 8.1376, "step:  1  loss:  8.1376  grad_norm:  0.1000  memory:  2.00GiB(25.00%)  tps: 2,000  "
         "tflops: 4.00  mfu: n/a  1.0% eta 0:00:50"),
        (8e12, 0.5, "step:  1  loss:  0.5000  grad_norm:  0.1000  memory:  2.00GiB(25.00%)  tps: 2,000  "
         "tflops: 4.00  mfu: 50.00%  1.0% eta 0:00:50"),
        (None, math.nan, "step:  1  loss:     nan  grad_norm:  0.1000  memory:  2.00GiB(25.00%)  tps: 2,000  "
         "tflops: 4.00  mfu: n/a  1.0% eta 0:00:50"),
    ],
)  # fmt: skip
def test_the_step_line_has_loss_memory_speed_and_eta(
    peak: float | None,
    loss: float | None,
    line: str,
    build: Callable[..., Metrics],
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = build(peak_flops=peak)
    clock.now += 0.5
    metrics.record(record(1, share=loss))
    with caplog.at_level(logging.INFO):
        metrics.log(1)
    assert caplog.messages == [line]


def test_eta_counts_pauses_but_not_the_first_step(
    build: Callable[..., Metrics], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(log_freq=11, total_steps=22)
    run(metrics, clock, range(1, 2), seconds=500.0)
    run(metrics, clock, range(2, 11))
    with metrics.throughput.pause():
        clock.now += 10.0
    with caplog.at_level(logging.INFO):
        run(metrics, clock, range(11, 12))
    # 11 steps remain, and the last 10 steps took 20 s.
    assert caplog.messages[-1].endswith("  50.0% eta 0:00:22")


def test_a_run_of_extremely_many_steps_has_an_eta(
    build: Callable[..., Metrics], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(log_freq=2, total_steps=10**15)
    with caplog.at_level(logging.INFO):
        run(metrics, clock, range(1, 3))
    assert " days, " in caplog.messages[-1].rpartition(" eta ")[2]


def test_scalars_have_torchtitans_names(build: Callable[..., Metrics], clock: Clock) -> None:
    metrics = build(peak_flops=1e13)
    metrics.sinks.append(sink := Scalars())
    run(metrics, clock, range(1, 2))
    assert {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "throughput(tps)",
        "tflops",
        "mfu(%)",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "time_metrics/data_loading(%)",
        "n_tokens_seen",
        "lr",
    } <= set(sink.written[1])
    assert sink.written[1]["memory/rss(GiB)"] == 2.0
    metrics.close()
    assert "closed" in sink.written


def test_learning_rates_of_groups_reach_the_row_the_log_and_the_scalars(
    build: Callable[..., Metrics],
    clock: Clock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = build()
    metrics.sinks.append(sink := Scalars())
    caplog.set_level(logging.INFO)
    run(metrics, clock, range(1, 2), lr=1e-3, group_lr={"head": 2e-3, "norms": 5e-4})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["lr"], row["group_lr"]) == (1e-3, {"head": 2e-3, "norms": 5e-4})
    assert caplog.messages[-1].endswith("  lr: 0.001 head 0.002 norms 0.0005")
    assert (sink.written[1]["lr/head"], sink.written[1]["lr/norms"]) == (2e-3, 5e-4)


def test_validation_writes_a_row_scalars_and_a_line(
    build: Callable[..., Metrics], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build(world_size=2)
    metrics.n_tokens_seen = 5000
    metrics.sinks.append(sink := Scalars())
    caplog.set_level(logging.INFO)
    metrics.validation(20, 5.25, 2.125, num_tokens=4000, seconds=4.0)
    metrics.validation(40, math.inf, None, num_tokens=4000, seconds=0.0)
    rows = read_rows(tmp_path / "validation.jsonl")
    assert [(row["step"], row["loss"], row["num_tokens"]) for row in rows] == [
        (20, 5.25, 4000),
        (40, math.inf, 4000),
    ]
    assert (rows[0]["tps"], rows[0]["bits_per_byte"], rows[0]["n_tokens_seen"]) == (
        500.0,
        2.125,
        5000,
    )
    assert "tps" not in rows[1] and "bits_per_byte" not in rows[1]
    assert sink.written[20] == {
        "validation_metrics/loss": 5.25,
        "validation_metrics/bits_per_byte": 2.125,
        "validation_metrics/throughput(tps)": 500.0,
        "validation_metrics/memory/rss(GiB)": 2.0,
        "validation_metrics/memory/rss(%)": 25.0,
    }
    assert caplog.messages[0] == (
        "validate step: 20  loss:  5.2500  bits/byte: 2.1250  memory:  2.00GiB(25.00%)  tps: 500"
    )
    metrics.validation(60, 4.5, None, num_tokens=10, seconds=1.0, dataset="wiki")
    assert read_rows(tmp_path / "validation.jsonl")[2]["set"] == "wiki" and "set" not in rows[0]
    assert sink.written[60]["validation_metrics/wiki/loss"] == 4.5
    assert caplog.messages[-1].startswith("validate wiki step: 60  loss:  4.5000")


def test_validation_of_the_first_dataset_is_compared_with_the_reference(
    build: Callable[..., Metrics], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metrics = build(reference=ReferenceCurve({1: {80: 2.25, 160: 2.0}, 2: {80: 2.35}}, "web"))
    for step, dataset in ((10, "web"), (10, "web.ema"), (10, "wiki"), (15, "web"), (30, "web")):
        metrics.n_tokens_seen = 8 * step
        metrics.validation(step, 1.5, 2.31, num_tokens=10, seconds=1.0, dataset=dataset)
    metrics.n_tokens_seen = 80
    metrics.validation(10, 1.5, None, num_tokens=10, seconds=1.0, dataset="web")
    assert [line for line in caplog.messages if "recipe" in line] == [
        "2.31 bits/byte at step 10; recipe: 2.30 (2.25 to 2.35, 2 seeds)",
        "2.31 bits/byte at step 15; recipe: 2.12",
    ]
    rows = read_rows(tmp_path / "validation.jsonl")
    compared = [row.get("reference_bits_per_byte") for row in rows]
    assert compared == [pytest.approx(2.3), None, None, 2.125, None, None]


# ---- stop and resume


def test_resume_moves_rows_after_its_checkpoint(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    first = build(log_freq=1)
    run(first, clock, range(1, 10))
    for step in (3, 6, 9):
        first.validation(step, 1.0, None, 10, 1.0)
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 10, "n_tok')  # killed in the middle of a line

    second = build(log_freq=1, attempt=2)
    second.rewind(7)
    second.n_tokens_seen = 7 * TOKENS
    run(second, clock, range(8, 13))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["n_tokens_seen"] == 12 * TOKENS and second.n_tokens_seen == 12 * TOKENS
    assert [row["step"] for row in read_rows(tmp_path / "validation.jsonl")] == [3, 6]
    discarded = (tmp_path / "metrics.discarded-2.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in discarded[:2]] == [8, 9] and len(discarded) == 3
    assert [row["step"] for row in read_rows(tmp_path / "validation.discarded-2.jsonl")] == [9]


def test_a_start_from_scratch_moves_all_rows(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path
) -> None:
    run(build(log_freq=1), clock, range(1, 4))
    second = build(log_freq=1, attempt=2)
    second.rewind(0)
    run(second, clock, range(1, 3))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tokens_seen_include_steps_that_are_not_logged_yet(build: Callable[..., Metrics]) -> None:
    metrics = build(log_freq=10)
    for step in (1, 2, 3):
        metrics.record(record(step))
    assert metrics.n_tokens_seen == 3 * TOKENS
