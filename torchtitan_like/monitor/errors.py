"""Error records: each rank that ends with an exception leaves one; the earliest is the cause."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_like.monitor.log import logger
from torchtitan_like.util import run_directory
from torchtitan_like.util.credentials import mask_text
from torchtitan_like.util.files import write_atomically


def _gpu() -> int | None:
    """Return this process's GPU among those it sees; None without a GPU, or after a driver error."""
    import torch

    try:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else None
    except RuntimeError:
        return None


def record_error(
    attempt_folder: Path, rank: int, phase: str, step: int, error: Exception
) -> dict[str, Any]:
    """Write ``errors/rank-<r>.json``, and ``errors/first.json`` if no rank did before. Never raises.

    Returns the record.
    """
    record = {
        "time": time.time(),
        "host": socket.gethostname(),
        "gpu": _gpu(),
        "rank": rank,
        "phase": phase,
        "step": step,
        "traceback": mask_text("".join(traceback.format_exception(error))),
    }
    path = run_directory.error_file(attempt_folder, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record) + "\n")
        with suppress(OSError):  # another rank was faster, or the file system has no hard links
            os.link(path, path.with_name(run_directory.FIRST_ERROR))
    except OSError as problem:
        logger.warning(f"The error that follows could not be recorded: {problem}")
    return record
