"""Read the pickles of a checkpoint without running code.

A pickle may import and call any function, so loading one can run a program. Only this module and
`dcp_metadata.py` unpickle files (docs/guides/security.md, "What is trusted"). This one reads:

* `.metadata` of torch.distributed.checkpoint: a pickle of the classes in `TORCH_TYPES`.
* Files and items that `torch.save` writes (`.pt` files, items of a DCP file): torch reads them
  with `weights_only`.

torch's own `FileSystemReader` and `DefaultLoadPlanner` unpickle without a list. Use `CheckedReader`
and `CheckedPlanner` instead.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_like.checkpoint import dcp_metadata
from torchtitan_like.checkpoint.dcp_metadata import (
    METADATA,
    as_checkpoint_error,
    refused_by_torch,
)


def load_metadata(content: bytes | bytearray, file: Path, *, trust: bool = False) -> Metadata:
    """Unpickle a `.metadata` into torch's classes, after `dcp_metadata.load_metadata` accepts it."""
    dcp_metadata.load_metadata(content, file, trust=trust)
    metadata: Metadata = pickle.loads(content)
    return metadata


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


class CheckedReader(FileSystemReader):
    """torch's reader of a DCP folder, restricted to the listed globals. trust: allow any global."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        super().__init__(path)
        self.folder = path
        self.trust = trust

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for a refused class, DamagedError if it is not DCP metadata."""
        file = self.folder / METADATA
        metadata = load_metadata(file.read_bytes(), file, trust=self.trust)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with as_checkpoint_error(self.folder):
            future: Future[None] = super().read_data(plan, planner)
        return future


class CheckedPlanner(DefaultLoadPlanner):
    """torch's load planner, restricted to the listed globals. trust: allow any global."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = load_saved(value, self.folder, trust=self.trust)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


class CheckedEmptyPlanner(CheckedPlanner, _EmptyStateDictLoadPlanner):
    """A `CheckedPlanner` that loads all stored entries into an empty state dict."""
