"""Why a start has failed: every rank that an error ends leaves a record, and the earliest of them is the one to read."""

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
from torchtitan_like.util.credentials import mask_text
from torchtitan_like.util.files import write_atomically

FIRST = "first.json"


def _gpu() -> int | None:
    """Number of this process's GPU among those it sees; None without one, and where the driver tells no more."""
    import torch

    try:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else None
    except RuntimeError:
        return None


def record_error(attempt_folder: Path, rank: int, phase: str, step: int, error: Exception) -> dict[str, Any]:
    """Leave ``errors/rank-<r>.json`` in the attempt's folder, the first one as `FIRST` too; what stands in it. Never raises."""
    record = {"time": time.time(), "host": socket.gethostname(), "gpu": _gpu(), "rank": rank, "phase": phase, "step": step,
              "traceback": mask_text("".join(traceback.format_exception(error)))}  # fmt: skip
    path = attempt_folder / "errors" / f"rank-{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record) + "\n")
        with suppress(OSError):  # a peer was faster, or there are no links here
            os.link(path, path.with_name(FIRST))
    except OSError as problem:
        logger.warning(f"The error that follows could not be recorded: {problem}")
    return record


def first_error(attempt_folder: Path) -> dict[str, Any] | None:
    """The first record that was left. What each rank may read as it ends: thousands would read thousands of records."""
    try:
        record: dict[str, Any] = json.loads((attempt_folder / "errors" / FIRST).read_text(encoding="utf-8"))
    except OSError:
        return None
    return record


def errors_of(attempt_folder: Path) -> list[dict[str, Any]]:
    """The records of an attempt's ranks; the earliest is the cause: a peer dies of the connection that it has broken."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in attempt_folder.glob("errors/rank-*.json")]


def in_words(record: dict[str, Any]) -> str:
    """Who, where and when, then the traceback."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    gpu = "" if record.get("gpu") is None else f"GPU {record['gpu']}, "
    head = f"{when}, host {record['host']}, {gpu}rank {record['rank']}, step {record['step']}, phase {record['phase']}:"
    return f"{head}\n{record['traceback'].rstrip()}"
