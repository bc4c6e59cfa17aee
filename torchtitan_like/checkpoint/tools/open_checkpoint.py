"""Open a checkpoint of any format as a `Source`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_like.checkpoint.dcp_source import DcpSource, StepSource
from torchtitan_like.checkpoint.errors import CheckpointError, unwrap
from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors
from torchtitan_like.checkpoint.pth_source import open_pt
from torchtitan_like.checkpoint.source import Source
from torchtitan_like.checkpoint.start import Format, format_of
from torchtitan_like.checkpoint.step_folders import (
    file_records,
    read_manifest,
    suggest_step,
)

# Naming convention of each format. Formats of one family share names; the model's tables translate
# from one family to another.
FAMILIES: dict[Format, str] = {"native": "ours", "hf": "hf", "dcp": "torch", "pt": "torch"}


def open_checkpoint(path: Path, *, trust_pickle: bool = False) -> Source:
    """Read the headers and indices of a checkpoint.

    trust_pickle: unpickle any class that the checkpoint names. This may run code of its author.
    Raises CheckpointError; DamagedError if the bytes differ from the bytes that were written.
    """
    if path.is_file():
        return open_pt(path, trust=trust_pickle)
    stored_format = format_of(path)
    if stored_format == "dcp":
        return DcpSource(path, trust=trust_pickle)
    manifest = read_manifest(path) or {}
    if stored_format == "hf":
        return open_safetensors(path, quantized=False, manifest=manifest)
    if stored_format == "native":
        return StepSource(path, file_records(manifest), manifest, trust=trust_pickle)
    raise CheckpointError(
        f"{path} is not a checkpoint of a supported format. Expected a step-N, a folder of "
        f"safetensors or of torch.distributed.checkpoint, or a .pt file: {suggest_step(path)}"
    )


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert any exception of torch about malformed bytes into a CheckpointError."""
    try:
        yield
    except CheckpointException as problem:  # not a subclass of Exception
        raise unwrap(problem) from problem
    except (CheckpointError, OSError):
        raise
    except Exception as problem:
        raise CheckpointError(
            f"{path} cannot be read: {type(problem).__name__}: {problem}. Expected a checkpoint of "
            "torch: copy it again"
        ) from problem


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without the module, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
