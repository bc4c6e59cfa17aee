"""A server of torchft that tells replica groups which of them are alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serve_lighthouse(
    bind: str, *, min_replicas: int, join_timeout_ms: int, heartbeat_timeout_ms: int
) -> Iterator[str]:
    """Serve at HOST:PORT, and yield the URL. Raises ValueError if it cannot listen there.

    Needs torchft. Its threads get a copy of this thread's blocked signals.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    host, _, port = bind.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        shown = f"[{address}]" if ":" in address else address
        server = LighthouseServer(
            bind=f"{shown}:{int(port)}",
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The lighthouse cannot listen on {bind!r}: {error}. Expected HOST:PORT with "
            "an address of this machine and a free port: correct --bind"
        ) from error
    try:
        yield f"http://{shown}:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()
