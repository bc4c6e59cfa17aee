"""The option that writes new counts."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-counts", action="store_true", help="write what is counted into counts.json"
    )
