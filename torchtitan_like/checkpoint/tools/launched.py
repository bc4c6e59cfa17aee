"""A group of all ranks that torchrun started, or only this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from torchtitan_like.distributed.world import HostGroup, launched_as

TIMEOUT = timedelta(hours=2)  # long enough for the slowest rank's disk


@contextmanager
def launched_group() -> Iterator[HostGroup]:
    """Join the ranks of a checkpoint command on the CPU; only rank 0 logs at level INFO."""
    launched = launched_as()
    level = logging.INFO if launched.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    if launched.world_size > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    group = HostGroup(list(range(launched.world_size)), TIMEOUT)
    try:
        yield group
    finally:
        group.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()
