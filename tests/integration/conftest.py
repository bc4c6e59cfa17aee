"""Fixtures of the integration tests: a fork server for the trainer's ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.trainer import ForkServer, Starter
from tests.integration.forked import ForkedTrainer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Starter]:
    starter = ForkServer({})
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def run_forked(fork_server: Starter) -> ForkedTrainer:
    return ForkedTrainer(fork_server)
