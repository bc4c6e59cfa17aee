"""Remove what a test has registered: other tests run in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_like.util import registry


@contextmanager
def extensions_removed() -> Iterator[None]:
    """Restore the registered names, and forget imported .py files, at the end of the block."""
    before = {kind: dict(table) for kind, table in registry._tables.items()}
    try:
        yield
    finally:
        for kind, table in before.items():
            registry._tables[kind].clear()
            registry._tables[kind].update(table)
        for name in [name for name in sys.modules if name.startswith("file:")]:
            del sys.modules[name]
