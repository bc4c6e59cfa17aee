"""Weights of TorchTitan's checkpoints (torch DCP) and of Meta's `consolidated.*.pth`, in place, on every topology."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf.load import LoadReport, load_weights
from torchtitan_like.checkpoint.hf.pieces import Form, Piece, within
from torchtitan_like.checkpoint.unpickle import CheckedPlanner, CheckedReader, load_saved
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.models.hf_table import Rows, Table, slices

# What TorchTitan keeps beside the model's own names, which stand at the top level.
_NOT_THE_MODEL = re.compile(r"(optimizer|lr_scheduler|dataloader|train_state)\b.*")
_PREFIX = "model."  # before the model's names, in its older checkpoints


def load_torchtitan(folder: Path, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, votes: Votes) -> LoadReport:
    """The model of a step of TorchTitan's (a folder with `.metadata`) into `tensors`, as `load.load_weights` does.

    Optimizer, schedule and data position are not read: its parameters are in another order of rows than ours.
    """
    source = votes.leader_does(lambda: _open_dcp(folder))
    return load_weights(source, tensors, rows=rows, tied=tied, votes=votes)


def load_meta(path: Path, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, votes: Votes) -> LoadReport:
    """One `.pth` file, or a folder of `consolidated.00.pth`, `.01.pth` ..., into `tensors`, as `load.load_weights` does.

    The files are mapped, not read: only what a rank needs becomes resident.
    """
    opened: list[MetaSource] = []
    votes.all_do(lambda: opened.append(_open_meta(path)))
    return load_weights(opened[0], tensors, rows=rows, tied=tied, votes=votes)


# ---- TorchTitan


@dataclass(frozen=True)
class DcpSource:
    """The model's part of a DCP checkpoint; `prefix` stands before the names in `metadata`."""

    path: Path
    stored: Mapping[str, Form]
    metadata: Metadata
    prefix: str

    def fill(self, wanted: Iterable[Piece]) -> None:
        """Load each stored chunk that has something for this rank once, and hand out its numbers."""
        by_name: dict[str, list[Piece]] = {}
        for piece in wanted:
            by_name.setdefault(piece.theirs, []).append(piece)
        met: dict[MetadataIndex, list[Piece]] = {}
        items = []
        for name, pieces in by_name.items():
            for chunk in _tensor(self.metadata, self.prefix + name).chunks:
                here = [part for piece in pieces if (part := within(piece, chunk.offsets, chunk.sizes))]
                if here:
                    index, zeros = MetadataIndex(self.prefix + name, chunk.offsets), torch.Size([0] * len(chunk.sizes))
                    met[index] = here
                    items.append(ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, chunk.sizes))
        reader = CheckedReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        reader.read_data(LoadPlan(items), _HandOut(self.path, self.metadata, met)).wait()


class _HandOut(CheckedPlanner):
    """Receives whole chunks, and copies to the pieces what each has in common with one."""

    def __init__(
        self, folder: Path, metadata: Metadata, pieces: Mapping[MetadataIndex, Sequence[Piece]]
    ) -> None:
        super().__init__(folder)
        self.stored, self.pieces = metadata, pieces

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        dtype = _tensor(self.stored, read_item.storage_index.fqn).properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        for piece in self.pieces[read_item.storage_index]:
            piece.target.copy_(tensor[slices(piece.box)])


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _open_dcp(folder: Path) -> DcpSource:
    """What is stored, of which all files must be there and long enough (DamagedError)."""
    if not (folder / ".metadata").exists():
        raise CheckpointError(f"{folder} is no checkpoint of torch.distributed.checkpoint: it has no .metadata")
    metadata = CheckedReader(folder).read_metadata()
    tensors = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not _NOT_THE_MODEL.fullmatch(name)
    }
    for name, entry in tensors.items():  # what no chunk holds would stay as it was initialised
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise DamagedError(f"{folder / '.metadata'} does not say where all of {name} {list(entry.size)} is")
    stored_at = {index: where for index, where in metadata.storage_data.items() if index.fqn in tensors}
    needed: dict[str, int] = {}
    for where in stored_at.values():
        needed[where.relative_path] = max(needed.get(where.relative_path, 0), where.offset + where.length)
    for file, size in needed.items():
        found = (folder / file).stat().st_size if (folder / file).exists() else 0
        if found < size:
            raise DamagedError(f"{folder / file} has {found} bytes of the {size} that were written to it")
    prefix = _PREFIX if tensors and all(name.startswith(_PREFIX) for name in tensors) else ""
    stored = {name[len(prefix) :]: Form(tuple(t.size), t.properties.dtype) for name, t in tensors.items()}
    # Every rank gets this: without the optimizer's entries it is a third as long.
    part = replace(metadata, state_dict_metadata=dict(tensors), storage_data=stored_at)
    return DcpSource(folder, stored, part, prefix)


# ---- Meta


@dataclass(frozen=True)
class MetaSource:
    """The tensors of one or several model-parallel files, each in parts: (offset in the whole tensor, part)."""

    path: Path
    stored: Mapping[str, Form]
    parts: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]]

    def fill(self, wanted: Iterable[Piece]) -> None:
        for piece in wanted:
            for offsets, part in self.parts[piece.theirs]:
                if here := within(piece, offsets, part.shape):
                    here.target.copy_(part[slices(here.box)])


def _open_meta(path: Path) -> MetaSource:
    files = [path] if path.is_file() else sorted(path.glob("consolidated.*.pth"))
    if not files:
        raise CheckpointError(f"{path} holds no consolidated.*.pth: give the file, or the folder that contains them")
    expected = [path] if path.is_file() else [path / f"consolidated.{i:02d}.pth" for i in range(len(files))]
    if files != expected:
        raise DamagedError(f"{path} is not whole: of its files {', '.join(f.name for f in files)} some are not there")
    states = [_map_file(file) for file in files]
    for file, state in zip(files, states, strict=True):
        if differing := state.keys() ^ states[0].keys():
            raise DamagedError(f"{file} and {files[0]} do not hold parts of the same tensors: {sorted(differing)}")
    width = states[0]["norm.weight"].shape[0] if "norm.weight" in states[0] else 0
    stored, parts = {}, {}
    for name in states[0]:
        mine = [state[name] for state in states]
        if len({(part.shape, part.dtype) for part in mine}) > 1:
            raise DamagedError(f"{path}: the parts of {name} differ in shape or dtype from file to file")
        dim = _split_dim(name, mine[0], width)
        if dim is None and not all(torch.equal(part, mine[0]) for part in mine[1:]):
            raise DamagedError(f"{path}: {name} stands in each file as a whole, with other numbers in some")
        mine = mine[:1] if dim is None else mine
        shape = [n * len(mine) if d == dim else n for d, n in enumerate(mine[0].shape)]
        steps = [mine[0].shape[d] if d == dim else 0 for d in range(len(shape))]
        stored[name] = Form(tuple(shape), mine[0].dtype)
        parts[name] = [(tuple(i * step for step in steps), part) for i, part in enumerate(mine)]
    return MetaSource(path, stored, parts)


def _split_dim(name: str, part: Tensor, width: int) -> int | None:
    """Which dimension the files share out. Vectors stand in each as a whole; `width` is the model's.

    As Meta's code builds its layers (github.com/meta-llama/llama-models): row-parallel wo and w2, column-parallel others,
    and an embedding that Llama 3 splits by rows, its predecessors by columns.
    """
    if part.ndim != 2:
        return None
    if name.endswith(("wo.weight", "w2.weight")):
        return 1
    return 1 if name.startswith("tok_embeddings") and part.shape[1] != width else 0


def _map_file(file: Path) -> dict[str, Tensor]:
    if not is_zipfile(file):
        raise DamagedError(f"{file} is cut short, or was not written by torch.save of torch 1.6 or later")
    state = load_saved(file, file, mmap=True)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} holds a {type(state).__name__}: expected a state dict, name -> tensor")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
