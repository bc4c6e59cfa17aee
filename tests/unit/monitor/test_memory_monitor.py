"""The memory monitors, with fake counters of the CUDA allocator."""

from __future__ import annotations

import logging

import pytest
import torch

from torchtitan_like.monitor.memory import (
    GIB,
    CudaMemoryMonitor,
    HostMemoryMonitor,
    build_memory_monitor,
    is_out_of_memory,
    oom_advice,
)

Stats = dict[str, int]


def cuda_stats(retries: int = 0, ooms: int = 0) -> Stats:
    return {
        "active_bytes.all.peak": 20 * GIB,
        "active_bytes.small_pool.peak": 3 * GIB,
        "active_bytes.large_pool.peak": 17 * GIB,
        "reserved_bytes.all.peak": 40 * GIB,
        "reserved_bytes.small_pool.peak": 8 * GIB,
        "reserved_bytes.large_pool.peak": 32 * GIB,
        "num_alloc_retries": retries,
        "num_ooms": ooms,
    }


def cuda_monitor(readings: list[Stats]) -> tuple[CudaMemoryMonitor, list[str]]:
    resets: list[str] = []
    remaining = iter(readings)
    return CudaMemoryMonitor(
        "H100", 80 * GIB, lambda: next(remaining), lambda: resets.append("reset")
    ), resets


def test_cuda_peaks_have_torchtitans_names() -> None:
    monitor, resets = cuda_monitor([cuda_stats()])
    assert resets == ["reset"], "peaks of the start-up were counted"
    reading = monitor.read()
    assert (reading.gib, reading.percent) == (40.0, 50.0)
    assert reading.scalars == {
        "memory/max_active(GiB)": 20.0,
        "memory/max_active(%)": 25.0,
        "memory/max_reserved(GiB)": 40.0,
        "memory/max_reserved(%)": 50.0,
        "memory/num_alloc_retries": 0.0,
        "memory/num_ooms": 0.0,
    }
    monitor.reset()
    assert resets == ["reset", "reset"]
    assert monitor.describe() == "CUDA capacity: H100 with 80.00GiB memory"


@pytest.mark.parametrize(
    ("counts", "warnings"),
    [
        ([(0, 0), (0, 0)], 0),
        ([(2, 0), (2, 0)], 1),
        ([(1, 0), (1, 1)], 2),
        ([(0, 0), (3, 1)], 1),
    ],
)
def test_each_new_retry_or_oom_causes_a_warning(
    counts: list[tuple[int, int]], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    monitor, _ = cuda_monitor([cuda_stats(*pair) for pair in counts])
    with caplog.at_level(logging.WARNING):
        readings = [monitor.read() for _ in counts]
    assert len(caplog.records) == warnings
    if warnings:
        assert "small pool 3.00GiB active of 8.00GiB reserved" in caplog.text
        assert "large pool 17.00GiB active of 32.00GiB reserved" in caplog.text
        assert oom_advice() in caplog.text
    last = readings[-1].scalars
    assert (last["memory/num_alloc_retries"], last["memory/num_ooms"]) == counts[-1]


def test_the_host_monitor_reports_the_resident_set() -> None:
    reading = HostMemoryMonitor("a CPU", 16 * GIB, lambda: 4 * GIB).read()
    assert (reading.gib, reading.percent) == (4.0, 25.0)
    assert reading.scalars == {"memory/rss(GiB)": 4.0, "memory/rss(%)": 25.0}


def test_the_cpu_monitor_measures_an_allocation() -> None:
    monitor = build_memory_monitor(torch.device("cpu"))
    before = monitor.read().gib
    block = torch.ones(64 * 1024**2 // 4)  # 64 MiB, written to
    increase = monitor.read().gib - before
    del block
    assert 0.05 < increase < 0.2
    assert monitor.capacity_gib > before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (RuntimeError("shape mismatch"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_cause_of_an_error_may_be_out_of_memory() -> None:
    """A pipeline stage wraps any error of a pass in a RuntimeError."""
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)
    wrapped.__cause__ = ValueError("shape mismatch")
    assert not is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "key", ["activation_checkpoint.mode", "training.local_batch_size", "loss.chunk_mib"]
)
def test_advice_names_the_three_cheapest_keys(key: str) -> None:
    assert key in oom_advice()
