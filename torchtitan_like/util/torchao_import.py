"""Import torchao without its warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Of its libraries for other hardware, and of the constants that it registers.
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def fewer_warnings() -> Iterator[None]:
    """Silence warnings about torchao that a user can do nothing about."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
