"""Read what `torch.save` wrote without running code: `.pt` files, and items of a DCP file.

A pickle may import and call any function, so loading one can run a program. Only this module and
`dcp_metadata.py` unpickle files (docs/guides/security.md, "What is trusted"). torch reads these
files with `weights_only`. Its own `FileSystemReader` and `DefaultLoadPlanner` unpickle without a
list: use the sources of `dcp_source.py` instead.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from torchtitan_like.checkpoint.dcp_metadata import (
    as_checkpoint_error,
    refused_by_torch,
)


def load_saved(
    source: Path | IO[bytes], file: Path, *, trust: bool = False, mmap: bool = False
) -> Any:
    """Load data that `torch.save` wrote: tensors and plain Python values, on the CPU.

    file: its path, for messages. trust: allow any global. Raises CheckpointError if it uses another
    class, DamagedError if it cannot be read.
    """
    with as_checkpoint_error(file):
        if not trust:
            _check_archive(source)
        try:
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)
        except pickle.UnpicklingError as problem:
            if not _import_torchao(problem):
                raise
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust)


def load_tensor(source: IO[bytes], file: Path) -> torch.Tensor:
    """Load a tensor of a DCP file on the CPU. file: its path, for messages."""
    with as_checkpoint_error(file):
        value = torch.load(source, map_location="cpu", weights_only=True)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a {type(value).__name__} instead of a tensor")
    return value


def _check_archive(source: Path | IO[bytes]) -> None:
    """Raise ValueError if the members of a zip file have more bytes than the file."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            size = sum(member.file_size for member in archive.infolist())
            num_bytes = archive.start_dir  # of the members
        if size > num_bytes:
            raise ValueError(f"{size:,} bytes are compressed into {num_bytes:,}")
    if not isinstance(source, Path):
        source.seek(0)


def _bytearray(content: str | bytes = b"", *encoding: str) -> bytearray:
    """Replace `bytearray` in torch's list. bytearray(n) allocates any number n of bytes."""
    if type(content) not in (str, bytes):
        raise TypeError(f"a bytearray of {type(content).__name__}")
    return bytearray(content, *encoding)


_get_allowed_globals()["builtins.bytearray"] = _bytearray


def _import_torchao(problem: pickle.UnpicklingError) -> bool:
    """Import torchao if torch refused one of its types. Returns True if torchao is installed.

    The import adds torchao's types to torch's list of safe types.
    """
    if not (refused_by_torch(problem) or "").startswith("torchao."):
        return False
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True
