"""Write a Hugging Face export: each rank writes its own parts of the final files.

No rank ever holds a whole sharded tensor. `plan.py` makes the plan, and this module executes it. A
rank fills each extent that it owns, in the dtype of the file, from its own shards and from messages
of other ranks. It writes the extent once. This needs a few extents of memory in addition to the
weights. The bytes are the same for any number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.output_files import Output, run_in_rounds
from torchtitan_like.checkpoint.hf.plan import (
    Copy,
    ExtentId,
    HeldBoxes,
    OutputTensor,
    ShardInfo,
    ShardKey,
    assign_extents,
    describe_shards,
    extents_of,
    group_by_file,
    group_by_size,
    lay_out_files,
    merge_shards,
    plan_copies,
    plan_tensors,
)
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, FileLayout
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Rows, Table
from torchtitan_like.util.extents import EXTENT, FileRecord
from torchtitan_like.util.shards import local_shard

logger = logging.getLogger()

EXTENTS_PER_ROUND = 8  # extents that a rank writes between two exchanges
_ALIGNMENT = 16  # bytes; no element is wider


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rows: Rows,
    tied: Table,
    dtype: torch.dtype | None,
    group: HostGroup,
    shard_bytes: int = 5 * 10**9,
    index: Mapping[str, str] | None = None,
    copies: Table = (),
) -> dict[str, FileRecord]:
    """Write `tensors` as `model*.safetensors`. All ranks of the group call it together.

    tensors: native names -> detached DTensor, or a tensor that is equal on all ranks; may be empty.
    dtype: target dtype of the floating-point tensors; None keeps their dtypes.
    shard_bytes: maximum bytes of tensors in one file.
    index: weight_map of a model.safetensors.index.json. If it has all names, it decides which
        tensors share a file, instead of `shard_bytes`.
    copies: see `plan_tensors`.

    Returns the records of all files, index included, on every rank. Raises CheckpointError on all
    ranks if any of them fails, with rank, file, and reason; the caller then removes the folder.
    """
    group = with_checkpoint_errors(group)
    rank = group.rank
    views: dict[ShardKey, Tensor] = {}

    def describe() -> list[ShardInfo]:
        warn_of_overflow(tensors, dtype)
        infos, own_views = describe_shards(tensors)
        views.update(own_views)
        return infos

    infos = group.gather_objects(group.run_on_all(describe))
    shards = merge_shards(infos, [f"rank {r}" for r in range(group.size)])
    outputs = plan_tensors(shards, rows, tied, dtype, copies)
    groups = _group_tensors(outputs, shard_bytes, index)
    start = time.monotonic()
    files = lay_out_files(outputs, groups)
    owners = assign_extents(files, outputs, group.size)
    with Output(folder, files, group) as output:
        output.create(extent for extent, owner in owners.items() if owner == rank)
        _Exchange(files, outputs, owners, views, group).run(output)
        records = output.finish()
    seconds = time.monotonic() - start
    total = sum(file.size for file in files)
    logger.info(
        f"Exported {total:,} bytes in {len(files)} files in {seconds:.2f} seconds "
        f"({total / seconds / 1e9:.2f} GB/s)"
    )
    return records


def _group_tensors(
    outputs: Mapping[str, OutputTensor], shard_bytes: int, index: Mapping[str, str] | None
) -> list[list[str]]:
    if not outputs:
        raise CheckpointError(
            "no rank has a tensor to export. Expected the weights of a model: check the checkpoint"
        )
    if index is None:
        return group_by_size(outputs, shard_bytes)
    missing = [name for name in outputs if name not in index]
    if not missing:
        return group_by_file(outputs, index)
    logger.warning(
        f"Ignoring the index of the assets: it lacks {len(missing)} of {len(outputs)} tensors "
        f"(such as {missing[0]}). Each file of the export has at most {shard_bytes:,} bytes"
    )
    return group_by_size(outputs, shard_bytes)


class _Exchange:
    """Sends, receives, and writes this rank's copies, EXTENTS_PER_ROUND extents per round."""

    def __init__(
        self,
        files: Sequence[FileLayout],
        outputs: Mapping[str, OutputTensor],
        owners: Mapping[ExtentId, int],
        views: Mapping[ShardKey, Tensor],
        group: HostGroup,
    ) -> None:
        self._views = views
        self._group = group
        self._rank = rank = group.rank
        counts: dict[int, int] = defaultdict(int)
        round_of: dict[ExtentId, int] = {}
        self._own_extents: dict[int, list[ExtentId]] = defaultdict(list)
        for extent in extents_of(files):
            owner = owners[extent]
            round_of[extent] = counts[owner] // EXTENTS_PER_ROUND
            counts[owner] += 1
            if owner == rank:
                self._own_extents[round_of[extent]].append(extent)
        self._num_rounds = max(round_of.values()) + 1
        self._copies: dict[ExtentId, list[Copy]] = defaultdict(list)
        # Round -> peer -> copies.
        self._outgoing: dict[int, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
        self._incoming: dict[int, dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))

        def choose_sender(extent: ExtentId, part: HeldBoxes) -> int | None:
            owner = owners[extent]
            if owner in part.holders:
                sender = owner
            else:
                sender = part.holders[extent[1] % len(part.holders)]
            return sender if rank in (owner, sender) else None

        for copy in plan_copies(files, outputs, choose_sender):
            owner = owners[copy.extent]
            number = round_of[copy.extent]
            if owner != rank:
                self._outgoing[number][owner].append(copy)
                continue
            self._copies[copy.extent].append(copy)
            if copy.holder != rank:
                self._incoming[number][copy.holder].append(copy)
        self._posted: dict[int, list[Any]] = {}
        self._messages: dict[tuple[int, int], Tensor] = {}  # (round, peer) -> received bytes
        self._received: dict[Copy, Tensor] = {}
        self._failure: Exception | None = None

    def run(self, output: Output) -> None:
        """Fill and write all extents of this rank.

        Raises CheckpointError on all ranks if any rank fails.
        """
        buffer = torch.empty(EXTENT, dtype=torch.uint8)

        def write(number: int) -> None:
            if self._failure is not None:
                raise self._failure
            for extent in self._own_extents[number]:
                data = output.prepare(extent, buffer)
                for copy in self._copies.get(extent, ()):
                    copy.write(data, self._values(copy))
                output.write(extent, data)

        self._post(0)
        try:
            run_in_rounds(self._group, self._num_rounds, write, self._exchange)
        except CheckpointError:
            # All ranks stopped in the same round, with the messages of the next round posted.
            for number in list(self._posted):
                self._complete(number)
            raise

    def _values(self, copy: Copy) -> Tensor:
        if copy.holder != self._rank:
            return self._received[copy]
        return self._read(copy)

    def _read(self, copy: Copy) -> Tensor:
        """Return the values as a view of this rank's memory."""
        view: Tensor = copy.boxes.view(self._views[copy.part.shard])
        return view

    def _exchange(self, number: int) -> None:
        """Receive this round's messages. Post the next round's to overlap them with writing."""
        self._post(number + 1)
        self._complete(number)
        self._received = {}
        for peer, copies in self._incoming.pop(number, {}).items():
            message = self._messages.pop((number, peer))
            self._received.update(zip(copies, _unpack(message, copies), strict=True))

    def _post(self, number: int) -> None:
        group = self._group.group
        works = self._posted[number] = []
        for peer, copies in self._outgoing.pop(number, {}).items():
            message = torch.empty(_message_bytes(copies), dtype=torch.uint8)
            try:
                for copy, values in zip(copies, _unpack(message, copies), strict=True):
                    values.copy_(self._read(copy))
            except RuntimeError as error:  # send anyway: the peer waits for a message
                self._failure = error
            works.append((dist.isend(message, group=group, group_dst=peer, tag=number), message))
        for peer, copies in self._incoming.get(number, {}).items():
            message = torch.empty(_message_bytes(copies), dtype=torch.uint8)
            self._messages[number, peer] = message
            works.append((dist.irecv(message, group=group, group_src=peer, tag=number), message))

    def _complete(self, number: int) -> None:
        for work, _ in self._posted.pop(number):
            work.wait()


def _message_bytes(copies: Sequence[Copy]) -> int:
    return sum(-(-copy.nbytes // _ALIGNMENT) * _ALIGNMENT for copy in copies)


def _unpack(message: Tensor, copies: Sequence[Copy]) -> list[Tensor]:
    """Return a view of each copy's values in a message, in the file's dtype and shape."""
    values = []
    start = 0
    for copy in copies:
        data = message[start : start + copy.nbytes]
        values.append(data.view(DTYPES[copy.entry.dtype]).view(copy.shape))
        start += -(-copy.nbytes // _ALIGNMENT) * _ALIGNMENT
    return values


def warn_of_overflow(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Log the floating-point tensors whose local shard has numbers beyond the range of `dtype`."""
    if dtype is None or not dtype.is_floating_point:
        return
    names = [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and _overflows(tensor, dtype)
    ]
    if names:
        logger.warning(
            f"{len(names)} tensors overflow to infinity in {str(dtype).removeprefix('torch.')}: "
            f"{', '.join(names)}. Expected numbers up to {torch.finfo(dtype).max:g}. Use "
            "bfloat16 or float32"
        )


def _overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    local = local_shard(tensor)
    # bfloat16 has nearly the range of float32. A check would read all weights for half a percent.
    if (
        not local.is_floating_point()
        or not local.numel()
        or torch.finfo(local.dtype).max < 2 * torch.finfo(dtype).max
    ):
        return False
    return bool(torch.stack(torch.aminmax(local)).to(dtype).isinf().any())
