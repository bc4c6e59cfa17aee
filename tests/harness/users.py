"""Run a test's code as a user without rights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def as_user_without_rights() -> Iterator[None]:
    """Run as the user nobody, because root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("root cannot switch to another user")
    try:
        yield
    finally:
        os.seteuid(0)
