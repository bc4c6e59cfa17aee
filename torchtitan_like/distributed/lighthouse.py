"""A server of torchft that tells replica groups which of them are alive.

    python -m torchtitan_like.distributed.lighthouse --bind 127.0.0.1:29510 --min-replicas 1

Runs until Ctrl-C or SIGTERM. All groups of a job need it ([fault_tolerance]); if it ends, they
stop, and continue from their checkpoints. Needs the extra `ft` (torchft). Whoever reaches the port
can stop a job: choose an address of a private network. Returns 2 for wrong arguments, or without
torchft.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.output import show_error


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


def main(words: Sequence[str] | None = None) -> int:
    """Serve. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_like.distributed.lighthouse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="the only address to listen on; port 0 is any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--min-replicas",
        type=int,
        default=1,
        metavar="N",
        help="fewest replica groups of a quorum (default: %(default)s)",
    )
    parser.add_argument(
        "--join-timeout-ms",
        type=int,
        default=10_000,
        metavar="N",
        help="wait so long for groups that are alive and have not joined (default: %(default)s)",
    )
    parser.add_argument(
        "--heartbeat-timeout-ms",
        type=int,
        default=5_000,
        metavar="N",
        help="a group without a heartbeat for so long is lost (default: %(default)s)",
    )
    arguments = parser.parse_args(words)
    numbers = arguments.min_replicas, arguments.join_timeout_ms, arguments.heartbeat_timeout_ms
    if min(numbers) < 1:
        parser.error("--min-replicas and the timeouts must be at least 1")
    if importlib.util.find_spec("torchft") is None:
        show_error(
            "The package torchft is not installed. Expected it for a lighthouse: "
            f"{pip_install('torchft>=0.2,<0.3')}"
        )
        return WRONG_INPUT
    stop_signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)  # also in the threads of the server
    try:
        with serve_lighthouse(
            arguments.bind,
            min_replicas=arguments.min_replicas,
            join_timeout_ms=arguments.join_timeout_ms,
            heartbeat_timeout_ms=arguments.heartbeat_timeout_ms,
        ) as url:
            print(f"Lighthouse: start the replica groups with TORCHFT_LIGHTHOUSE={url}", flush=True)
            signal.sigwait(stop_signals)
    except ValueError as error:
        show_error(str(error))
        return WRONG_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
