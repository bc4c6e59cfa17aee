"""Read or build on one rank, for all ranks. All ranks raise the error of any rank.

`read_once` reads metadata on rank 0 and sends it to the others.

`build_once` builds a file on one rank of each file system. A build may take hours, and a collective
only minutes, so the builder works in a thread. Once a second all ranks sum how many builders are
still working and how many have failed. An error of one builder reaches every rank within seconds,
before another rank starts the same work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.distributed.world import HostGroup

T = TypeVar("T")

POLL_SECONDS = 1.0
# Attribute caching of NFS may hide a new folder from other nodes for this long.
VISIBLE_SECONDS = 60.0


def read_once(
    group: HostGroup,
    path: str,
    read: Callable[[], T],
    is_local: Callable[[T], bool] = lambda _: True,
) -> T:
    """Return the result of ``read`` for ``path``. A collective of ``group``.

    Rank 0 calls ``read`` for all ranks: otherwise thousands of ranks would query one file server
    for thousands of files. A rank with another path, or for which ``is_local`` returns False, calls
    it too, because a node may have its own copy. All ranks raise the error of any rank.
    """
    own_path = os.path.abspath(path)
    first_path, result = group.run_on_leader(lambda: (own_path, read()))
    return group.run_on_all(
        lambda: result if first_path == own_path and is_local(result) else read()
    )


def build_once(
    group: HostGroup,
    find: Callable[[], T | None],
    build: Callable[[threading.Event], T],
    folder: Callable[[], Path],
    entry_name: str,
    description: str,
) -> T:
    """Return the result of ``find`` on each rank, and build missing entries. A collective.

    build: receives an event that is set when it must end.
    folder: folder in which rank 0 would build. A probe file in it shows which ranks share the file
        system.
    entry_name: ranks that share a folder share an entry of the same name, but a node may have
        another copy of the text.
    description: describes the entry in messages.

    Raises the error of the first failed rank on all ranks.
    """
    entry = group.run_on_all(find)
    (num_missing,) = group.sum_async([entry is None]).wait()
    if not num_missing:
        assert entry is not None
        return entry
    stop = threading.Event()
    is_builder = _is_builder(group, entry is None, folder, entry_name)
    with ThreadPoolExecutor(1, "build") as pool:
        work = pool.submit(build, stop) if is_builder else None
        try:
            _wait_for_all(group, work)
        finally:  # also after a signal: the pool waits for the thread
            stop.set()
    return _wait_until_visible(group, find, description)


def _is_builder(
    group: HostGroup, is_missing: bool, folder: Callable[[], Path], entry_name: str
) -> bool:
    """Return True on the first rank of each file system that lacks the entry. A collective.

    Rank 0 leaves an empty file in its folder: ranks that see it share the file system. The others
    share one with the ranks of their host.
    """
    probe = group.run_on_leader(lambda: _leave_probe(folder()) if is_missing else None)
    is_shared = probe is not None and _is_visible(probe)
    group.barrier()  # every rank has looked
    if probe is not None and group.rank == 0:
        with suppress(OSError):  # an empty file remains
            probe.unlink(missing_ok=True)
    location = ("" if is_shared else socket.gethostname(), entry_name)
    locations = group.gather_objects(location if is_missing else None)
    return is_missing and locations.index(location) == group.rank


def _leave_probe(folder: Path) -> Path:
    probe = folder / f".{uuid.uuid4().hex}.probe"
    probe.touch()
    return probe


def _is_visible(path: Path) -> bool:
    return path.exists()


def _wait_for_all(group: HostGroup, work: Future[T] | None) -> None:
    """Return when every builder is done. Raises the first rank's error as soon as any failed."""
    while True:
        if work is not None:
            wait([work], POLL_SECONDS if group.size > 1 else None)
        is_working = work is not None and not work.done()
        error = work.exception() if work is not None and not is_working else None
        num_working, num_failed = group.sum_async([is_working, error is not None]).wait()
        if num_failed:
            raise next(error for error in group.gather_objects(error) if error is not None)
        if not num_working:
            return
        if work is None:
            time.sleep(POLL_SECONDS / 2)


def _wait_until_visible(group: HostGroup, find: Callable[[], T | None], description: str) -> T:
    """Return the new entry once this rank sees it. A collective."""

    def wait_for_entry() -> T | None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while (entry := find()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return entry

    entry = group.run_on_all(wait_for_entry)
    missing = group.gather_objects(None if entry is not None else socket.gethostname())
    hosts = sorted({host for host in missing if host is not None})
    if entry is None or hosts:
        raise DataError(
            f"{description} was built, but is not visible on hosts {', '.join(hosts)}. Expected a "
            "shared folder: set data.cache_folder to a folder that all nodes share, or to a folder "
            "on a local disk of each node"
        )
    return entry
