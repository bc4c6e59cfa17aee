"""Metrics of a run of one rank, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_like.config.sections_run import Metrics as MetricsSection
from torchtitan_like.monitor.memory import GIB, HostMemoryMonitor
from torchtitan_like.monitor.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def alone(local: torch.Tensor) -> torch.Tensor:
    return local.unsqueeze(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def build(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Metrics]]:
    made: list[Metrics] = []

    def make(log_freq: int = 10, alarm: float = 0.25, **changes: Any) -> Metrics:
        arguments: dict[str, Any] = {
            "folder": tmp_path,
            "attempt": 1,
            "writer": True,
            "gather": alone,
            "flops_per_token": 2e9,
            "peak_flops": None,
            "world_size": 1,
            "memory_monitor": HostMemoryMonitor("CPU", 8 * GIB, lambda: 2 * GIB),
            "total_steps": 100,
            "clock": clock,
            "wall_clock": lambda: 1.7e9 + clock.now,
        } | changes
        section = MetricsSection(log_freq=log_freq, data_loading_alarm=alarm)
        made.append(Metrics(section, **arguments))
        return made[-1]

    yield make
    for metrics in made:
        metrics.close()
