"""Ports for what a test starts."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports of this machine at which nobody listens.

    They are below those that the system gives to a connection by itself: else another process could have one by the time
    it is used.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(10_000, 32_000), 1_000):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between 10,000 and 32,000")
