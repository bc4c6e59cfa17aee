"""The flight recorder of collectives: what each rank has called, kept in memory until a run stands still."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Comm

logger = logging.getLogger()

# What torchrun puts into its workers' environment where the user has set nothing.
TORCHRUN_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def set_up_recorder(comm: Comm, folder: Path) -> None:
    """Tell torch what to record and where NCCL's own watchdog writes it: before any group is made, as it is read then."""
    wanted = {"TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size)}
    if torch.cuda.is_available():
        wanted |= {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(comm.trace_buf_size > 0)),
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / comm.save_traces_folder / comm.save_traces_file_prefix),
            # Pipelines send single messages on groups of two ranks, where nothing else can be held
            # up by them.
            "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a failed collective ends the process without cleaning up first
        }
        with suppress(OSError):  # a folder that cannot be written ends the run a moment later, by agreement
            (folder / comm.save_traces_folder).mkdir(parents=True, exist_ok=True)
    for name, value in wanted.items():
        if os.environ.get(name, value) not in (value, TORCHRUN_DEFAULTS.get(name)):
            logger.warning(f"{name}={os.environ[name]} in the environment is overridden with {value}")
        os.environ[name] = value


def trace_file(comm: Comm, folder: Path, rank: int) -> tuple[Path, Callable[[], bytes]] | None:
    """Where a rank's dump goes, and what makes it; None when nothing is recorded."""
    if comm.trace_buf_size == 0:
        return None
    return folder / comm.save_traces_folder / f"{comm.save_traces_file_prefix}{rank}", recorded


def recorded() -> bytes:
    """What has been recorded so far, as torch's own dumps are (a pickle, which its `torchfrtrace` reads)."""
    from torch._C import _distributed_c10d as c10d

    dump = c10d._dump_nccl_trace if torch.cuda.is_available() else c10d._dump_fr_trace  # type: ignore[attr-defined]
    trace: bytes = dump()
    return trace
