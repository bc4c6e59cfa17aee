"""End the hung ranks of a node when another rank fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchtitan_like.util import run_directory

logger = logging.getLogger()


def kill_hung_peers(
    attempt_folder: Path,
    stall_seconds: float,
    rank: int,
    num_ranks: int,
    clock: Callable[[], float] = time.time,
) -> None:
    """Kill the ranks of this launcher whose heartbeat is older than `stall_seconds`.

    For a rank that fails: its hung peers cannot end by themselves, and torchrun waits for them for
    half a minute before it kills them.
    """
    import psutil

    # torchrun numbers the ranks of a node consecutively. Other launchers set neither variable.
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    own_process = (socket.gethostname(), os.getppid())
    for peer in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))):
        file = run_directory.heartbeat_file(attempt_folder, peer)
        with suppress(OSError, ValueError, psutil.Error):  # the peer has ended
            heartbeat = json.loads(file.read_text(encoding="utf-8"))
            pid = heartbeat["pid"]
            seconds = clock() - heartbeat["time"]
            is_peer = (
                pid != os.getpid()
                and (heartbeat["host"], psutil.Process(pid).ppid()) == own_process
            )
            if is_peer and seconds > stall_seconds:
                logger.error(f"{file.stem} has hung for {seconds:.0f} s: killing it")
                os.kill(pid, signal.SIGKILL)
