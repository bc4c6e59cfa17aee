"""Find free ports, and the addresses on which processes listen."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import sys
from collections.abc import Iterable
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Return ports of this machine on which no process listens.

    They are below the system's ephemeral ports, which another process could get before the test
    uses them.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(10_000, 32_000), 1_000):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError(f"no {count} free ports between 10,000 and 32,000")


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """Return the addresses of the TCP sockets on which processes listen, from /proc (Linux)."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                sockets.add(os.readlink(descriptor))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                addresses.append(_address(local.partition(":")[0]))
    return addresses


def _address(text: str) -> str:
    """Convert an address that the kernel prints as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)
