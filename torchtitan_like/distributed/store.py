"""TCP stores that listen on one address of this machine. torch's own listen on all of them."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import MutableMapping
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger()

LOOPBACK = "127.0.0.1"
# Environment variable: prefix of the store's keys for one (re)start. A store outlives a restart,
# and its older keys hold the addresses of dead ranks.
ROUND = "TORCHTITAN_LIKE_ROUND"


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and loopback addresses.

    Other names may resolve differently on other machines.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the address of ``host`` only, or None for another machine's.

    A machine may resolve its own name to loopback, which other machines cannot reach. The socket
    then listens on all addresses, as torch's do, with a warning. Raises OSError if the port is in
    use.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    for family, _, _, _, (address, *_) in candidates:
        if is_loopback(str(address)) and not is_loopback(host):
            return bind_all(port, f"{host} resolves to {address} on this machine")
        try:
            return socket.create_server((str(address), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None


def bind_all(port: int, reason: str) -> socket.socket:
    """Return a socket that listens on all addresses, and log a warning with the reason."""
    logger.warning(
        f"Port {port} listens on all addresses: {reason}, expected the address of a network "
        "interface. Set MASTER_ADDR to the IP address of the network to use, or close the port to "
        "others with a firewall"
    )
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def store_on(listener: socket.socket, host: str, timeout: timedelta) -> dist.TCPStore:
    """Return a store that this process hosts on ``listener``, which the store closes."""
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def host_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store that this process hosts on the address of ``host`` (port 0: any free port).

    An address that is routed to this machine, but not its own (a virtual IP), cannot be bound. The
    store then listens on all addresses, with a warning. Raises OSError if the port is in use.
    """
    listener = bind(host, port) or bind_all(port, f"{host} is no address of this machine")
    return store_on(listener, host, timeout)


def stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on loopback if all ranks run on this machine.

    Variables that are set are kept. By default gloo listens on the address of the machine's name,
    and NCCL on the first network interface.
    """
    is_one_machine = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if not is_one_machine and not is_loopback(environ.get("MASTER_ADDR", "")):
        return
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # Linux, macOS
            environ.setdefault("GLOO_SOCKET_IFNAME", name)
            environ.setdefault("NCCL_SOCKET_IFNAME", name)
