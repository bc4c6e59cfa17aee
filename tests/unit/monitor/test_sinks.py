"""TensorBoard and W&B receive the right scalars from the right ranks and are imported on demand."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_like.config.sections_run import Metrics as MetricsSection
from torchtitan_like.monitor.metrics import Metrics
from torchtitan_like.monitor.sinks import TensorBoard, WeightsAndBiases
from torchtitan_like.util.files import WriteFailures


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the event files below `folder` with TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_the_written_scalars(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tb")
    for step in (1, 10):
        board.write(
            step, {"loss_metrics/global_avg_loss": 1.5 * step, "lr": 0.25, "mfu(%)": float("nan")}
        )
    # The writer is still open: a dashboard reads the file during the run.
    curves = scalars_of(board.folder)
    assert curves["loss_metrics/global_avg_loss"] == [(1, 1.5), (10, 15.0)]
    assert curves["lr"] == [(1, 0.25), (10, 0.25)]
    board.close()


def test_write_flushes_each_step_to_the_file(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tb")
    sizes = [0]
    for step in range(20):
        board.write(step, {"lr": 0.25})
        sizes.append(sum(path.stat().st_size for path in board.folder.iterdir()))
    board.close()
    assert all(later > earlier for earlier, later in zip(sizes, sizes[1:], strict=False))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_curves_continue_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full for one step, in the middle of a record."""
    from tensorboard.summary.writer import record_writer

    failures = WriteFailures()
    board = TensorBoard(tmp_path / "tb", failures=failures)
    board.write(1, {"loss": 1.0, "lr": 0.5})
    with monkeypatch.context() as patch:

        def fail(writer: Any, data: bytes) -> None:
            writer._writer.write(data[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(record_writer.RecordWriter, "write", fail)
        board.write(2, {"loss": 2.0, "lr": 0.5})
    for step in (3, 4):
        board.write(step, {"loss": float(step), "lr": 0.5})
    board.close()
    assert failures.summary() == f"{board.folder}: 1"
    curves = [scalars_of(file) for file in sorted(board.folder.iterdir())]
    assert [curve["loss"] for curve in curves] == [[(1, 1.0)], [(3, 3.0), (4, 4.0)]]


def test_each_attempt_has_its_own_folder(tmp_path: Path) -> None:
    boards = [TensorBoard(tmp_path / "tb", wall_clock=lambda: 1.7e9) for _ in range(3)]
    assert len({board.folder for board in boards}) == 3
    assert {board.folder.parent for board in boards} == {tmp_path / "tb"}
    assert (
        TensorBoard(tmp_path / "tb", rank=3, wall_clock=lambda: 1.7e9).folder.parent.name
        == "rank_3"
    )


@pytest.mark.parametrize(
    ("rank", "for_all_ranks", "expected"),
    [(0, False, 1), (1, False, 0), (0, True, 1), (1, True, 1)],
)
def test_only_rank_0_writes_unless_all_ranks_are_requested(
    rank: int, for_all_ranks: bool, expected: int, build: Callable[..., Metrics], tmp_path: Path
) -> None:
    section = MetricsSection(enable_tensorboard=True, save_for_all_ranks=for_all_ranks)
    metrics = build(rank=rank, section=section)
    metrics.validation(1, 2.0, None, 1, 1.0)
    metrics.close()
    assert len(list((tmp_path / "tb").rglob("events.out.*"))) == expected


def test_wandb_gets_project_config_and_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda scalars, step: calls.append((step, scalars)), finish=lambda: calls.append("end")
    )
    fake = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "project-name")
    monkeypatch.setenv("WANDB_TEAM", "team-name")
    for name in ("WANDB_ENTITY", "WANDB_RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    sink = WeightsAndBiases(tmp_path / "tb", {"model": "llama3"})
    sink.write(7, {"lr": 0.5})
    sink.close()
    assert calls == [
        {
            "project": "project-name",
            "entity": "team-name",
            "name": None,
            "dir": str(tmp_path / "tb"),
            "config": {"model": "llama3"},
        },
        (7, {"lr": 0.5}),
        "end",
    ]


def test_the_monitor_package_imports_few_modules() -> None:
    """Only rows imports torch, and no module imports a dashboard or the config schema."""
    code = """
import sys
from torchtitan_like.monitor import attempt, experts, garbage, log, memory, profiler, sinks
from torchtitan_like.monitor import throughput
assert "torch" not in sys.modules
import torch
before = set(sys.modules)
import torchtitan_like.monitor.metrics
new = sorted(set(sys.modules) - before)
assert new == ["torchtitan_like.monitor.metrics", "torchtitan_like.monitor.rows"], new
assert not {"tensorboard", "wandb", "pandas", "pydantic"} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_tensorboard_is_imported_with_the_first_scalar(tmp_path: Path) -> None:
    code = f"""
import sys, pathlib
from torchtitan_like.monitor.sinks import TensorBoard
board = TensorBoard(pathlib.Path({str(tmp_path)!r}))
assert "tensorboard" not in sys.modules
board.write(1, {{"lr": 1.0}})
assert "tensorboard" in sys.modules
board.close()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
