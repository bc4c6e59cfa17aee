"""What the integration tests share: a process that forks the trainer's ranks quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.trainer import Starter, Warm
from tests.integration.forked import ForkedTrainer


@pytest.fixture(scope="session")
def warm() -> Iterator[Starter]:
    starter = Warm({})
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def run_forked(warm: Starter) -> ForkedTrainer:
    return ForkedTrainer(warm)
