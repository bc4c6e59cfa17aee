"""Deadlines and memory limits are reported in time, with a warning for a short grace period."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience import limits
from torchtitan_like.resilience.agreement import Request
from torchtitan_like.resilience.limits import Limits, end_of_slurm_job, used_memory_percent
from torchtitan_like.util.units import GIB

CPU = torch.device("cpu")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def build(clock: Clock, *, section: Any = None, **options: Any) -> Limits:
    return Limits(Resilience(**(section or {})), CPU, clock=clock, start_time=clock.now, **options)


def test_there_are_no_limits_by_default() -> None:
    clock = Clock()
    run_limits = build(clock, used_percent=lambda: 100.0, free_bytes=lambda: 0)
    clock.now += 1e9
    assert run_limits.reached() == []


def test_an_expired_deadline_stays_expired() -> None:
    clock = Clock()
    run_limits = build(clock, section={"max_runtime_minutes": 1.5})
    clock.now += 89.9
    assert run_limits.reached() == []
    clock.now += 0.1
    assert run_limits.reached() == run_limits.reached() == [Request.DEADLINE]


def test_a_rank_that_does_not_keep_time_ignores_the_deadline() -> None:
    clock = Clock()
    run_limits = build(clock, section={"max_runtime_minutes": 1}, is_leader=False)
    clock.now += 1e6
    assert run_limits.reached() == []


def test_auto_sets_the_deadline_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    monkeypatch.setenv("PATH", "/nowhere")
    run_limits = build(clock, section={"max_runtime_minutes": "auto", "grace_seconds": 700})
    assert run_limits.deadline == 4300
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert build(clock, section={"max_runtime_minutes": "auto"}).deadline is None
    assert "'auto' has no effect. Expected a Slurm job whose end is known" in caplog.text


@pytest.mark.parametrize(
    ("end_time", "expected"),
    [
        ("2026-11-22T05:16:25", datetime(2026, 11, 22, 5, 16, 25).timestamp()),
        ("Unknown", None),
        ("Tomorr 10:02", 1.0),  # of a Slurm that ignores the format asked for
    ],
)
def test_the_end_of_the_job_is_read_from_scontrol(
    end_time: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT $*" = "standard show -d job 7" ] && '
        f'echo "JobId=7 StartTime=1 EndTime={end_time} Deadline=N/A"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    # scontrol takes precedence: its answer includes later changes of the time limit.
    assert end_of_slurm_job({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1"}) == expected
    assert end_of_slurm_job({"SLURM_JOB_ID": "8"}) is None, "scontrol fails for this job"


def test_host_memory_is_checked_periodically() -> None:
    clock, used = Clock(), iter([94.0, 95.5])
    run_limits = build(clock, section={"max_cpu_mem_percent": 95}, used_percent=lambda: next(used))
    assert run_limits.reached() == run_limits.reached() == []
    clock.now += limits.INTERVAL
    assert run_limits.reached() == [Request.HOST_MEMORY]


@pytest.mark.parametrize(("freed", "expected"), [(3, []), (0, [Request.GPU_MEMORY])])
def test_gpu_memory_is_low_only_if_emptying_the_cache_does_not_help(
    freed: int, expected: list[Request]
) -> None:
    free = iter([1 * GIB, (1 + freed) * GIB])
    assert (
        build(Clock(), section={"min_free_gpu_gib": 2}, free_bytes=lambda: next(free)).reached()
        == expected
    )


def test_the_fuller_of_cgroup_and_host_is_reported(tmp_path: Path) -> None:
    host = used_memory_percent(tmp_path)
    for name, content in {
        "max": "1000\n",
        "current": "999\n",
        "stat": "anon 1\ninactive_file 9\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert used_memory_percent(tmp_path) == pytest.approx(99.0)
    (tmp_path / "memory.max").write_text("max\n")
    assert used_memory_percent(tmp_path) == pytest.approx(host, abs=5)


def test_a_grace_period_that_is_too_short_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_limits = build(Clock(), section={"grace_seconds": 60})
    run_limits.warn_of_untested_grace()
    run_limits.check_grace(10, 20)
    run_limits.warn_of_untested_grace()
    for _ in range(2):
        run_limits.check_grace(10, 21)
    untested, too_short = caplog.messages
    assert "no checkpoint has shown yet" in untested
    assert "grace_seconds is 60," in too_short and "Expected at least 62 s" in too_short
