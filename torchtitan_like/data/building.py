"""Build on one rank of each file system what all ranks need, and end all ranks together if it fails.

The work takes hours, and a collective may take minutes only. The builder therefore works in a
thread. Meanwhile all ranks sum every second how many are still working and how many have failed.
An error of one builder reaches every rank within seconds, before another rank starts the same work.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torchtitan_like.distributed.world import HostGroup

from .errors import DataError

T = TypeVar("T")

POLL_SECONDS = 1.0
# A network file system may show a new folder to other nodes only after this time (attribute
# caching of NFS).
VISIBLE_SECONDS = 60.0


def build_together(
    group: HostGroup,
    find: Callable[[], T | None],
    build: Callable[[threading.Event], T],
    folder: Callable[[], Path],
    entry_name: str,
    name: str,
) -> T:
    """What ``find`` returns on each rank, after ``build`` where it returned None. A collective of
    ``group``.

    build: is called with an event that is set when it is to end. folder: where rank 0 would build,
    to find out who shares it. entry_name: ranks that share a folder share the entry if its name is
    the same; a node may have another copy of the text.
    name: of what is built, for messages. Raises the error of the first rank that failed, on all
    ranks.
    """
    entry = group.everyone_does(find)
    (num_missing,) = group.sum_async([entry is None]).wait()
    if not num_missing:
        assert entry is not None
        return entry
    stop = threading.Event()
    is_builder = _is_first(group, entry is None, folder, entry_name)
    with ThreadPoolExecutor(1, "build") as pool:
        work = pool.submit(build, stop) if is_builder else None
        try:
            _wait_for_all(group, work)
        finally:  # also after a signal: the pool waits for the thread
            stop.set()
    return _visible(group, find, name)


def _is_first(
    group: HostGroup, is_missing: bool, folder: Callable[[], Path], entry_name: str
) -> bool:
    """Whether this rank is the first of those on its file system that lack the entry of this name.
    A collective.

    Rank 0 leaves an empty file in its folder: ranks that see it share the folder. Others share
    with the ranks of their host.
    """
    probe = group.leader_does(lambda: _leave_probe(folder()) if is_missing else None)
    shares = probe is not None and _is_visible(probe)
    group.barrier()  # everyone has looked
    if probe is not None and group.rank == 0:
        with suppress(OSError):  # an empty file stays
            probe.unlink(missing_ok=True)
    place = ("" if shares else socket.gethostname(), entry_name)
    places = group.gather_objects(place if is_missing else None)
    return is_missing and places.index(place) == group.rank


def _leave_probe(folder: Path) -> Path:
    probe = folder / f".{uuid.uuid4().hex}.probe"
    probe.touch()
    return probe


def _is_visible(path: Path) -> bool:
    return path.exists()


def _wait_for_all(group: HostGroup, work: Future[T] | None) -> None:
    """Return when every builder is done. Raises the first rank's error as soon as any has
    failed."""
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


def _visible(group: HostGroup, find: Callable[[], T | None], name: str) -> T:
    """The entry that was built, once this rank sees it. A collective."""

    def wait_for_entry() -> T | None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while (entry := find()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return entry

    entry = group.everyone_does(wait_for_entry)
    missing = group.gather_objects(None if entry is not None else socket.gethostname())
    hosts = sorted({host for host in missing if host is not None})
    if entry is None or hosts:
        raise DataError(
            f"{name} was built, but not every rank sees it (hosts {', '.join(hosts)}): "
            "set data.cache_folder to a folder that all nodes share, or to one on a disk of each node"
        )
    return entry
