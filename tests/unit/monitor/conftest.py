"""Metrics of a single-rank run with a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from torchtitan_like.config.sections_run import Metrics as MetricsSection
from torchtitan_like.extensions.user_code import Observers
from torchtitan_like.monitor.experts import ExpertMetrics
from torchtitan_like.monitor.memory import HostMemoryMonitor
from torchtitan_like.monitor.metrics import Metrics
from torchtitan_like.monitor.reference_curve import ReferenceCurve
from torchtitan_like.monitor.rows import Gather, RowCollector, RowFiles
from torchtitan_like.monitor.sinks import build_sinks
from torchtitan_like.monitor.throughput import ThroughputClock, TokenFlops
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.units import GIB


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gather_one_rank(local: torch.Tensor) -> torch.Tensor:
    return local.unsqueeze(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def build(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Metrics]]:
    """Return a function that builds metrics, by default for rank 0 and without a dashboard."""
    built: list[Metrics] = []

    def build_metrics(
        log_freq: int = 10,
        alarm: float = 0.25,
        *,
        folder: Path = tmp_path,
        attempt: int = 1,
        rank: int = 0,
        gather: Gather = gather_one_rank,
        sources: Sequence[str] = (),
        peak_flops: float | None = None,
        num_passes: float = 3.0,
        world_size: int = 1,
        total_steps: int = 100,
        section: MetricsSection | None = None,
        reference: ReferenceCurve | None = None,
    ) -> Metrics:
        failures = WriteFailures()
        throughput = ThroughputClock(
            TokenFlops(2e9, peak_flops, num_passes), world_size, alarm, clock
        )
        metrics = Metrics(
            RowCollector(gather, sources),
            throughput,
            HostMemoryMonitor("CPU", 8 * GIB, lambda: 2 * GIB),
            build_sinks(section or MetricsSection(), folder, rank, failures, run_config={}),
            RowFiles(folder, attempt, failures) if rank == 0 else None,
            Observers(),
            ExpertMetrics([0, 2]),
            reference,
            log_freq=log_freq,
            last_step=total_steps,
            wall_clock=lambda: 1.7e9 + clock.now,
        )
        built.append(metrics)
        return metrics

    yield build_metrics
    for metrics in built:
        metrics.close()
