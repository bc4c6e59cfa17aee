"""Rendezvous handlers for torchrun that open one store, on one address only.

torch's own handlers open two stores on every address of the machine, whatever host they are given.
Anyone who reaches such a store can write to it, and the launcher unpickles part of what it reads.
docs/guides/security.md lists the reachable ports.
"""

from __future__ import annotations

import errno
import os
import uuid
from datetime import timedelta
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


class FixedRendezvous(RendezvousHandler):
    """A fixed number of launchers with fixed ranks.

    Launcher 0 hosts the only store, which the workers use too. Launchers unpickle nothing from it.
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
        if self._rank == 0:
            return host_store(self._host, self._port, self._timeout)
        return dist.TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)

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
