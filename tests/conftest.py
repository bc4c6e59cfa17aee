"""What all tests share. Nothing here imports torch: many unit tests do not need it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch: one thread a process (ranks share the cores, sums must not depend on them); no network.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
# What a launcher has set for pytest itself is not meant for the code under test.
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    from hypothesis import settings

    # Ranks share two cores with the tests: a slow example is not a failing one.
    settings.register_profile("tests", deadline=None, print_blob=True)
    settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_tests() -> Iterator[None]:
    yield
    rank_pool = sys.modules.get("tests.harness.rank_pool")
    if rank_pool is not None:
        rank_pool.kill_all_pools()


@pytest.fixture
def repo_root() -> Path:
    """The folder of pyproject.toml."""
    return ROOT
