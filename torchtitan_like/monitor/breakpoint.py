"""What `breakpoint()` does under `BREAK_RANK=N ./run_train.sh`: rank N waits for a person; the other ranks go past it.

Ranks that torchrun starts have no terminal, so the debugger speaks through a port that only their machine reaches.
"""

from __future__ import annotations

import os
import socket
import sys
from pdb import Pdb

from torchtitan_like.monitor.log import logger


def wait_for_person() -> None:
    """Named by PYTHONBREAKPOINT. pdb's commands work; `continue` goes on without it, `quit` ends the run as an error does."""
    frame, rank = sys._getframe(1), os.environ.get("RANK", "0")
    if rank != os.environ.get("BREAK_RANK"):
        return
    port = int(os.environ.get("BREAK_PORT", "4444"))
    with socket.create_server(("127.0.0.1", port)) as server:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        logger.warning(f"Rank {rank} waits at {where} for pdb; on {socket.gethostname()}: nc 127.0.0.1 {port}")
        connection, _ = server.accept()
    with connection:
        typed, shown = connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8")
    Pdb(stdin=typed, stdout=shown, nosigint=True).set_trace(frame)
