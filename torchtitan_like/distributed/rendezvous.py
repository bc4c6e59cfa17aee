"""Rendezvous handlers for torchrun that open one store, on one address only.

torch's own handlers open two stores on every address of the machine, whatever host they are given.
Anyone who reaches such a store can write to it, and the launcher unpickles part of what it reads.
docs/guides/security.md lists the reachable ports.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from torchtitan_like.distributed.store import LOOPBACK, ROUND, bind, host_store, store_on

logger = logging.getLogger()

POLL_S = 0.2  # signals are handled between polls
# Key of the store of `FixedRendezvous`: all launchers have joined.
COMPLETE = "all launchers have joined"


class FixedRendezvous(RendezvousHandler):
    """A fixed number of launchers with fixed ranks.

    Launcher 0 hosts the only store, which the workers use too. Launchers unpickle nothing from it.

    A scheduler may replace a lost machine before the others have noticed the loss. The store that
    the new launcher finds then belongs to the earlier start: all of its launchers have joined, so
    the new one waits until launcher 0 has ended and another one hosts a new store.
    """

    def __init__(
        self, params: RendezvousParameters, host: str, port: int, *, rank: int, size: int
    ) -> None:
        self._backend = params.backend
        self._run_id = params.run_id
        self._host = host
        self._port = port
        self._rank = rank
        self._size = size
        self._timeout = _timeout(params, "timeout", 600)
        self._store: dist.TCPStore | None = None
        self._num_rounds = 0

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._open_store()
        self._num_rounds += 1
        if self._size == 1:  # several launchers restart independently, so their counts differ
            os.environ[ROUND] = str(self._num_rounds)
        address = RendezvousStoreInfo(self._host, self._store.port)
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._rank, self._size, address)

    def _open_store(self) -> dist.TCPStore:
        """Meet the other launchers at the store. Raises TimeoutError if they do not all arrive."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        return self._gather(deadline) if self._rank == 0 else self._join(deadline)

    def _gather(self, deadline: float) -> dist.TCPStore:
        """Host the store and wait until all launchers have joined."""
        store = host_store(self._host, self._port, self._timeout)
        missing = set(range(1, self._size))

        def has_all() -> bool:
            missing.difference_update(
                [rank for rank in sorted(missing) if store.check([_joined(rank)])]
            )
            return not missing

        try:
            self._wait_until(has_all, deadline)
        except TimeoutError as error:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"{error}. Missing machines: {ranks}") from None
        store.set(COMPLETE, "")
        return store

    def _join(self, deadline: float) -> dist.TCPStore:
        """Connect to the store of launcher 0, and wait until all launchers have joined."""
        while True:
            store = self._connect(deadline)
            with suppress(dist.DistError):  # launcher 0 has ended: meet at the next store
                if store.check([COMPLETE]):
                    logger.warning(
                        f"The store at {self._host}:{self._port} is of an earlier start, which has "
                        f"lost machine {self._rank}. Waiting until that start ends"
                    )
                    self._wait_until(partial(_has_ended, store), deadline)
                else:
                    store.set(_joined(self._rank), "")
                    self._wait_until(partial(store.check, [COMPLETE]), deadline)
                    return store

    def _connect(self, deadline: float) -> dist.TCPStore:
        """Return the store of launcher 0, which may not have started yet, or at a new address."""
        self._wait_until(partial(_is_listening, self._host, self._port), deadline)
        return dist.TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)

    def _wait_until(self, is_met: Callable[[], bool], deadline: float) -> None:
        while not is_met():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The {self._size} machines have not met at {self._host}:{self._port} within "
                    f"{self._timeout.total_seconds():.0f} s. Expected one launcher for each machine "
                    "and an open port: start all of them, and check MASTER_ADDR and the firewall"
                )
            time.sleep(POLL_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class OneStoreRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous with one store, which the launchers and the workers share.

    torch opens a second store for the workers, on another port and on every address.
    """

    def __init__(self, backend: str, handler: RendezvousHandler, host: str, port: int) -> None:
        self._backend = backend
        self._handler = handler
        self._address = RendezvousStoreInfo(host, port)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._handler.next_rendezvous()
        if info.rank == 0:
            info.store.set(ROUND, uuid.uuid4().hex)
        os.environ[ROUND] = info.store.get(ROUND).decode()
        return RendezvousInfo(info.store, info.rank, info.world_size, self._address)

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._handler.shutdown()


def create_loopback(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for one machine."""
    return FixedRendezvous(params, LOOPBACK, 0, rank=0, size=1)


def create_fixed(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for several machines whose ranks are given (torchrun's backend "static")."""
    host, port = _host_and_port(params)
    return FixedRendezvous(
        params, host, port, rank=int(params.config["rank"]), size=params.max_nodes
    )


def create_dynamic(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for machines that are ranked as they arrive (torchrun's backend "c10d")."""
    host, port = _host_and_port(params)
    timeout = _timeout(params, "read_timeout", 60)
    try:
        listener = bind(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener = None  # another launcher on this machine hosts the store
    if listener is not None:
        store = store_on(listener, host, timeout)
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    # torch's handler opens the second store unless this is set.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    handler = create_handler(store, C10dRendezvousBackend(store, params.run_id), params)
    return OneStoreRendezvous(params.backend, handler, host, port)


# torchrun's backends and their replacements. A single machine always uses "loopback".
BACKENDS = {"loopback": create_loopback, "static": create_fixed, "c10d": create_dynamic}


def register_backends() -> dict[str, str]:
    """Register the handlers with torchrun. Return the registered name of each of `BACKENDS`."""
    names = {name: f"torchtitan_like_{name}" for name in BACKENDS}
    for name, create in BACKENDS.items():
        rendezvous_handler_registry.register(names[name], create)
    return names


def _joined(rank: int) -> str:
    """Return the store's key that launcher `rank` sets when it joins."""
    return f"launcher {rank} has joined"


def _has_ended(store: dist.TCPStore) -> bool:
    """Return True if the process that hosts the store has ended."""
    try:
        store.check([COMPLETE])
    except dist.DistError:
        return True
    return False


def _is_listening(host: str, port: int) -> bool:
    """Return True if a connection can be opened. Resolves the name each time: it may move."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def _host_and_port(params: RendezvousParameters) -> tuple[str, int]:
    host, _, port = params.endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"The rendezvous endpoint is {params.endpoint!r}, expected HOST:PORT. "
            "Set MASTER_ADDR and MASTER_PORT, or torchrun's --rdzv_endpoint"
        )
    return host.strip("[]"), int(port)


def _timeout(params: RendezvousParameters, key: str, default: int) -> timedelta:
    return timedelta(seconds=cast(int, params.get_as_int(key, default)))
