"""`titan lighthouse`: tell replica groups which of them are alive."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket

from torchtitan_like.cli.common import FAILED, positive_int
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.modules import pip_install
from torchtitan_like.util.output import show_error


def configure_lighthouse(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="the only address to listen on; port 0 is any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--min-replicas",
        type=positive_int,
        default=1,
        metavar="N",
        help="fewest replica groups of a quorum (default: %(default)s)",
    )
    parser.add_argument(
        "--join-timeout-ms",
        type=positive_int,
        default=10_000,
        metavar="N",
        help="wait so long for groups that are alive and have not joined (default: %(default)s)",
    )
    parser.add_argument(
        "--heartbeat-timeout-ms",
        type=positive_int,
        default=5_000,
        metavar="N",
        help="a group without a heartbeat for so long is lost (default: %(default)s)",
    )
    parser.epilog = (
        "Runs until Ctrl-C or SIGTERM. All groups of a job need it ([fault_tolerance]); if it ends,\n"
        "they stop, and continue from their checkpoints. Needs the extra `ft` (torchft). Whoever\n"
        "reaches the port can stop a job: choose an address of a private network.\n\n"
        "example: titan lighthouse --bind 127.0.0.1:29510 --min-replicas 1"
    )


def run_lighthouse(arguments: argparse.Namespace) -> int:
    """Serve. Returns the exit code."""
    if importlib.util.find_spec("torchft") is None:
        show_error(
            "The package torchft is not installed. Expected it for a lighthouse: "
            f"{pip_install('torchft>=0.2,<0.3')}"
        )
        return int(ExitCode.BAD_CONFIG)
    host, _, port = arguments.bind.rpartition(":")
    stop_signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)  # also in the threads of the server
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        shown = f"[{address}]" if ":" in address else address
        server = LighthouseServer(
            bind=f"{shown}:{int(port)}",
            min_replicas=arguments.min_replicas,
            join_timeout_ms=arguments.join_timeout_ms,
            heartbeat_timeout_ms=arguments.heartbeat_timeout_ms,
        )
    except (OSError, ValueError, RuntimeError) as error:
        show_error(
            f"The lighthouse cannot listen on {arguments.bind!r}: {error}. Expected HOST:PORT with "
            "an address of this machine and a free port: correct --bind"
        )
        return FAILED
    url = f"http://{shown}:{server.address().rpartition(':')[2]}"
    print(f"Lighthouse: start the replica groups with TORCHFT_LIGHTHOUSE={url}", flush=True)
    signal.sigwait(stop_signals)
    server.shutdown()
    return 0
