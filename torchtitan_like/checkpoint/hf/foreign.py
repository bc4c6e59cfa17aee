"""Load weights of TorchTitan's checkpoints (torch DCP) and Meta's `consolidated.*.pth` in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torchtitan_like.checkpoint.hf.reads import Read, TensorInfo, crop_to_chunk
from torchtitan_like.checkpoint.unpickle import CheckedPlanner, CheckedReader, load_saved
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Rows, Table, slices

# Entries of a TorchTitan checkpoint that are not weights. The weights are at the top level too.
_NOT_THE_MODEL = re.compile(r"(optimizer|lr_scheduler|dataloader|train_state)\b.*")
_PREFIX = "model."  # prefix of the weights' names in older TorchTitan checkpoints


def load_torchtitan(
    folder: Path, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, group: HostGroup
) -> LoadReport:
    """Load the model of a TorchTitan step (a folder with `.metadata`), as `load_weights` does.

    `checkpoint/torchtitan.py` loads the optimizer and the progress of its run.
    """
    source = group.run_on_leader(lambda: open_dcp(folder))
    return load_weights(source, tensors, rows=rows, tied=tied, group=group)


def load_meta(
    path: Path, tensors: Mapping[str, Any], *, rows: Rows, tied: Table, group: HostGroup
) -> LoadReport:
    """Load a `.pth` file, or a folder with `consolidated.00.pth`, ..., as `load_weights` does.

    The files are memory-mapped: only the parts that a rank reads become resident.
    """
    opened: list[MetaSource] = []
    group.run_on_all(lambda: opened.append(_open_meta(path)))
    return load_weights(opened[0], tensors, rows=rows, tied=tied, group=group)


# ---- TorchTitan


@dataclass(frozen=True)
class DcpSource:
    """The weights, or one moment of the optimizer, in a DCP checkpoint, by parameter name.

    stored_names: parameter name -> name in `metadata`.
    """

    path: Path
    stored: Mapping[str, TensorInfo]
    metadata: Metadata
    stored_names: Mapping[str, str]

    def fill(self, reads: Iterable[Read]) -> None:
        """Load each chunk that this rank needs once, and copy from it to all targets."""
        by_name: dict[str, list[Read]] = {}
        for read in reads:
            by_name.setdefault(read.name, []).append(read)
        by_chunk: dict[MetadataIndex, list[Read]] = {}
        items = []
        for name, tensor_reads in by_name.items():
            stored_name = self.stored_names[name]
            for chunk in _tensor(self.metadata, stored_name).chunks:
                parts = [crop_to_chunk(read, chunk.offsets, chunk.sizes) for read in tensor_reads]
                chunk_reads = [part for part in parts if part is not None]
                if chunk_reads:
                    index = MetadataIndex(stored_name, chunk.offsets)
                    zeros = torch.Size([0] * len(chunk.sizes))
                    by_chunk[index] = chunk_reads
                    tensor = LoadItemType.TENSOR
                    items.append(ReadItem(tensor, index, zeros, index, zeros, chunk.sizes))
        reader = CheckedReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        planner = _ChunkPlanner(self.path, self.metadata, by_chunk)
        reader.read_data(LoadPlan(items), planner).wait()


class _ChunkPlanner(CheckedPlanner):
    """Receives whole chunks, and copies the parts that the reads need to their targets."""

    def __init__(
        self, folder: Path, metadata: Metadata, reads: Mapping[MetadataIndex, Sequence[Read]]
    ) -> None:
        super().__init__(folder)
        self.stored = metadata
        self.reads = reads

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        dtype = _tensor(self.stored, read_item.storage_index.fqn).properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        for read in self.reads[read_item.storage_index]:
            read.target.copy_(tensor[slices(read.box)])


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def weight_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each weight in a TorchTitan checkpoint, by parameter name."""
    weights = [name for name in names if not _NOT_THE_MODEL.fullmatch(name)]
    has_prefix = bool(weights) and all(name.startswith(_PREFIX) for name in weights)
    return {name.removeprefix(_PREFIX) if has_prefix else name: name for name in weights}


def open_dcp(
    folder: Path, select: Callable[[Iterable[str]], dict[str, str]] = weight_names
) -> DcpSource:
    """Read the metadata. Raises DamagedError if a file is absent or too short.

    select: returns the stored names of the wanted tensors, by parameter name.
    """
    if not (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder} is not a checkpoint of torch.distributed.checkpoint: it has no .metadata. "
            "Expected a step-N: give its path"
        )
    metadata = CheckedReader(folder).read_metadata()
    tensors = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    stored_names = select(tensors)
    tensors = {name: tensors[name] for name in stored_names.values()}
    for name, entry in tensors.items():  # elements without a chunk would keep their initial values
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise DamagedError(
                f"{folder / '.metadata'} lacks chunks of {name} {list(entry.size)}. Expected "
                "chunks for all elements: copy the checkpoint again"
            )
    storage = {index: info for index, info in metadata.storage_data.items() if index.fqn in tensors}
    file_sizes: dict[str, int] = {}
    for info in storage.values():
        end = info.offset + info.length
        file_sizes[info.relative_path] = max(file_sizes.get(info.relative_path, 0), end)
    for file, size in file_sizes.items():
        actual_size = (folder / file).stat().st_size if (folder / file).exists() else 0
        if actual_size < size:
            raise DamagedError(
                f"{folder / file} has {actual_size} bytes. Expected at least {size}: copy it again"
            )
    stored = {
        name: TensorInfo(tuple(tensors[full].size), tensors[full].properties.dtype)
        for name, full in stored_names.items()
    }
    # All ranks receive this. The other entries would triple its size.
    selected = replace(metadata, state_dict_metadata=dict(tensors), storage_data=storage)
    return DcpSource(folder, stored, selected, stored_names)


# ---- Meta


@dataclass(frozen=True)
class MetaSource:
    """The tensors of one or more model-parallel files: name -> (offset in the tensor, values)."""

    path: Path
    stored: Mapping[str, TensorInfo]
    parts: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]]

    def fill(self, reads: Iterable[Read]) -> None:
        for read in reads:
            for offsets, values in self.parts[read.name]:
                if part := crop_to_chunk(read, offsets, values.shape):
                    part.target.copy_(values[slices(part.box)])


def _open_meta(path: Path) -> MetaSource:
    files = [path] if path.is_file() else sorted(path.glob("consolidated.*.pth"))
    if not files:
        raise CheckpointError(
            f"{path} contains no consolidated.*.pth. Expected a file or a folder of such files: "
            "give its path"
        )
    expected = [path]
    if not path.is_file():
        expected = [path / f"consolidated.{i:02d}.pth" for i in range(len(files))]
    if files != expected:
        raise DamagedError(
            f"{path} is incomplete: it has only {', '.join(file.name for file in files)}. Expected "
            "files numbered from 00 without gaps: copy the missing ones"
        )
    states = [_map_file(file) for file in files]
    for file, state in zip(files, states, strict=True):
        if differing := state.keys() ^ states[0].keys():
            raise DamagedError(
                f"{file} and {files[0]} contain different tensors: {sorted(differing)}. Expected "
                "the files of one model: copy them again"
            )
    dim = states[0]["norm.weight"].shape[0] if "norm.weight" in states[0] else 0
    stored, parts = {}, {}
    for name in states[0]:
        values = [state[name] for state in states]
        if len({(part.shape, part.dtype) for part in values}) > 1:
            raise DamagedError(
                f"{path}: {name} differs in shape or dtype between files. Expected the files of "
                "one model: copy them again"
            )
        split_dim = _split_dim(name, values[0], dim)
        if split_dim is None:
            if not all(torch.equal(part, values[0]) for part in values[1:]):
                raise DamagedError(
                    f"{path}: the values of {name} differ between files. Expected equal values, "
                    "because it is not split: copy the files again"
                )
            values = values[:1]
        shape = [n * len(values) if d == split_dim else n for d, n in enumerate(values[0].shape)]
        steps = [values[0].shape[d] if d == split_dim else 0 for d in range(len(shape))]
        stored[name] = TensorInfo(tuple(shape), values[0].dtype)
        parts[name] = [(tuple(i * step for step in steps), part) for i, part in enumerate(values)]
    return MetaSource(path, stored, parts)


def _split_dim(name: str, part: Tensor, dim: int) -> int | None:
    """Return the dimension along which the files split a tensor; None if each has the whole tensor.

    The rules follow github.com/meta-llama/llama-models: wo and w2 are row-parallel, the other
    matrices are column-parallel, and vectors are not split. Llama 3 splits the embedding by rows,
    earlier models by columns. `dim` is the model's width.
    """
    if part.ndim != 2:
        return None
    if name.endswith(("wo.weight", "w2.weight")):
        return 1
    return 1 if name.startswith("tok_embeddings") and part.shape[1] != dim else 0


def _map_file(file: Path) -> dict[str, Tensor]:
    if not is_zipfile(file):
        raise DamagedError(
            f"{file} is not a zip file. Expected a file of torch.save (torch 1.6 or later): copy "
            "it again, because it may be truncated"
        )
    state = load_saved(file, file, mmap=True)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{file} contains a {type(state).__name__}. Expected a state dict (name -> tensor): "
            "save it with torch.save(model.state_dict(), file)"
        )
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
