"""Stores and rendezvous handlers listen only on the given address."""

from __future__ import annotations

import gc
import logging
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from tests.harness.ports import free_ports, listening_addresses
from torchtitan_like.distributed.rendezvous import create_dynamic, create_fixed, create_loopback
from torchtitan_like.distributed.store import ROUND, bind, host_store, stay_on_loopback

TIMEOUT = timedelta(seconds=30)


def new_addresses(before: list[str]) -> list[str]:
    """Return the addresses on which this process listens in addition to ``before``."""
    addresses = listening_addresses([os.getpid()])
    for address in before:
        addresses.remove(address)
    return addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_listens_on_its_host_only(host: str) -> None:
    before = listening_addresses([os.getpid()])
    store = host_store(host, 0, TIMEOUT)
    assert new_addresses(before) in (["127.0.0.1"], ["::1"])
    other = dist.TCPStore(host, store.port, is_master=False, timeout=TIMEOUT)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    assert bind("192.0.2.77", 0) is None  # RFC 5737: for documentation
    assert bind("no-such-host.invalid", 0) is None


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", server.getsockname()[1])


def test_a_name_that_resolves_to_loopback_listens_on_all_addresses(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Debian resolves the machine's own name to 127.0.1.1, which other machines cannot reach."""
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    before = listening_addresses([os.getpid()])
    listener = bind("node-1", 0)
    assert listener is not None
    with listener:
        assert new_addresses(before) in (["::"], ["0.0.0.0"])
    assert "listens on all addresses: node-1 resolves to 127.0.1.1" in caplog.text


ONE_MACHINE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        (ONE_MACHINE, "lo"),
        (ONE_MACHINE | {"LOCAL_WORLD_SIZE": "1"}, None),
        (ONE_MACHINE | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}, None),
        (ONE_MACHINE | {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
    ids=["one machine", "several", "several launchers on one", "unknown launcher", "chosen"],
)
def test_ranks_of_one_machine_use_loopback(environ: dict[str, str], interface: str | None) -> None:
    environ = dict(environ)
    stay_on_loopback(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def parameters(name: str, endpoint: str, num_nodes: int = 1, **config: Any) -> RendezvousParameters:
    return RendezvousParameters(
        name, endpoint, "run", num_nodes, num_nodes, local_addr="localhost", **config
    )


def test_one_machine_uses_loopback_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROUND, raising=False)
    before = listening_addresses([os.getpid()])
    handler = create_loopback(parameters("one", "ignored:0"))
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert new_addresses(before) == ["127.0.0.1"]
    assert handler.use_agent_store and os.environ[ROUND] == "2"
    for info in (first, second):
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"


@pytest.mark.parametrize("create", [create_fixed, create_dynamic])
def test_several_machines_share_a_store_at_the_given_address(
    create: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ROUND, raising=False)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    [port] = free_ports(1)
    before = listening_addresses([os.getpid()])
    handler = create(parameters("several", f"127.0.0.1:{port}", rank=0, last_call_timeout=1))
    info = handler.next_rendezvous()
    assert new_addresses(before) == ["127.0.0.1"]
    assert handler.use_agent_store and handler.get_backend() == "several"
    assert info.bootstrap_store_info is not None
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == (
        "127.0.0.1",
        port,
    )
    handler.shutdown()


def test_an_endpoint_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="The rendezvous endpoint is 'node-1', expected HOST:PORT"):
        create_fixed(parameters("several", "node-1", rank=0))


class Launchers:
    """Two launchers with fixed ranks, each in a thread."""

    def __init__(self) -> None:
        self.endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        self.threads = ThreadPoolExecutor()

    def start(self, rank: int) -> Future[RendezvousInfo]:
        handler = create_fixed(parameters("several", self.endpoint, 2, rank=rank, timeout=30))
        return self.threads.submit(handler.next_rendezvous)


class WaitsForWarning(logging.Handler):
    """Sets an event when the warning of an earlier start is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.is_logged = Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "is of an earlier start, which has lost machine 1" in record.getMessage():
            self.is_logged.set()


def test_a_replaced_machine_does_not_join_the_start_that_lost_it() -> None:
    launchers, warning = Launchers(), WaitsForWarning()
    logging.getLogger().addHandler(warning)
    try:
        lost = launchers.start(1)
        first = launchers.start(0)
        lost.result(30).store.set("of the first start", "")
        replacement = launchers.start(1)
        assert warning.is_logged.wait(30) and not replacement.done()
        first.result(30)
        del first, lost  # launcher 0 ends, and its store with it
        gc.collect()
        second = launchers.start(0)
        infos = [second.result(30), replacement.result(30)]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        assert not infos[1].store.check(["of the first start"])
    finally:
        logging.getLogger().removeHandler(warning)


def test_machines_that_do_not_arrive_are_named() -> None:
    [port] = free_ports(1)
    params = parameters("several", f"127.0.0.1:{port}", 3, rank=0, timeout=1)
    with pytest.raises(TimeoutError, match=r"not met at .* within 1 s.* Missing machines: 1, 2"):
        create_fixed(params).next_rendezvous()
