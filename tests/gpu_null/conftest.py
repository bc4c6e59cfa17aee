"""The option `--update-counts`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-counts", action="store_true", help="write the measured counts to counts.json"
    )
