"""Flight recorder: each rank keeps its latest collectives in memory, and dumps them if a run hangs."""

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

# Variables that torchrun sets for its workers unless the user has set them.
TORCHRUN_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def set_up_recorder(comm: Comm, folder: Path) -> None:
    """Set what torch records and where NCCL's watchdog writes it. Call it before creating groups."""
    variables = {"TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size)}
    if torch.cuda.is_available():
        variables |= {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(comm.trace_buf_size > 0)),
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(
                folder / comm.save_traces_folder / comm.save_traces_file_prefix
            ),
            # Pipelines send point-to-point messages on groups of two ranks, where they delay no
            # others.
            "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
            # A failed collective ends the process without cleaning up.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        }
        with suppress(OSError):  # an unwritable folder ends the run shortly after, on all ranks
            (folder / comm.save_traces_folder).mkdir(parents=True, exist_ok=True)
    for name, value in variables.items():
        if os.environ.get(name, value) not in (value, TORCHRUN_DEFAULTS.get(name)):
            logger.warning(
                f"{name}={os.environ[name]} in the environment is overridden with {value}"
            )
        os.environ[name] = value


def trace_file(comm: Comm, folder: Path, rank: int) -> tuple[Path, Callable[[], bytes]] | None:
    """Return the path of a rank's dump and a function that creates it; None if recording is off."""
    if comm.trace_buf_size == 0:
        return None
    path = folder / comm.save_traces_folder / f"{comm.save_traces_file_prefix}{rank}"
    return path, recorded


def recorded() -> bytes:
    """Return the recorded collectives in torch's dump format, a pickle that `torchfrtrace` reads."""
    from torch._C import _distributed_c10d as c10d

    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    dump = getattr(c10d, name)
    trace: bytes = dump()
    return trace
