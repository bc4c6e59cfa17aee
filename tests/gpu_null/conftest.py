"""The option `--update-counts`, and the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu_null.harness import build_device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-counts", action="store_true", help="write the measured counts to counts.json"
    )


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the null CUDA device and return its library."""
    if torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} is a CPU build; the null CUDA device needs a CUDA build. "
            "Run ./run_tests.sh --null-gpu"
        )
    return build_device(tmp_path_factory.mktemp("null_cuda"))
