"""Checks must give the same warnings on every machine."""

import pytest

from torchtitan_like.check import context


@pytest.fixture(autouse=True)
def a_cpu_with_bfloat16(monkeypatch):
    monkeypatch.setattr(context, "_cpu_has_bfloat16", lambda: True)
