"""Forget the modules and config sections of a test: other tests run in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_like.config import schema


@contextmanager
def forgotten(*modules: str) -> Iterator[None]:
    """At the end of the block, forget modules, imported .py files, and new config sections."""
    before = dict(schema._sections)
    try:
        yield
    finally:
        schema._sections.clear()
        schema._sections.update(before)
        for name in list(sys.modules):
            if name in modules or name.startswith("file:"):
                del sys.modules[name]
