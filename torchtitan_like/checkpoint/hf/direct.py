"""A Hugging Face export: every rank writes its own parts of the final files; no tensor is ever whole in one place.

Each extent is written once, by a rank that holds most of it; the others send it what is theirs, in the dtype of the
file. Beside the weights this takes a few extents of memory, and one rank or many write the same bytes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import EXTENT, FileRecord
from torchtitan_like.checkpoint.hf.consolidate import NUM_THREADS, consolidate_together, write_shards
from torchtitan_like.checkpoint.hf.output import Output, in_rounds
from torchtitan_like.checkpoint.hf.plan import (
    ExtentId,
    Key,
    Move,
    Part,
    Target,
    assign,
    divide,
    extents_of,
    group_by,
    hold,
    lay_out_all,
    merge,
    moves,
    targets,
)
from torchtitan_like.checkpoint.hf.safetensors_file import DTYPES, FileLayout
from torchtitan_like.checkpoint.overflow import warn_of_overflow
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.hf_table import Rows, Table

logger = logging.getLogger()

ROUND = 8  # extents that a rank writes between two exchanges
_ALIGN = 16  # bytes; no element is wider


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rows: Rows,
    tied: Table,
    dtype: torch.dtype | None,
    group: HostGroup,
    executor: Literal["direct", "consolidate"] = "direct",
    shard_bytes: int = 5 * 10**9,
    index: Mapping[str, str] | None = None,
) -> dict[str, FileRecord]:
    """Write `tensors` (our names -> detached DTensor, or tensor that is equal on all ranks) as `model*.safetensors`.

    All ranks of the group call it together; a rank may hold nothing. Floating-point tensors are converted to `dtype`
    (None: stay as they are). Files hold at most `shard_bytes` bytes of tensors, or what `index` (weight_map of a
    model.safetensors.index.json) puts together, when it knows all names. Both executors write the same bytes:
    `direct` at once, `consolidate` by way of `sharded/`. Returns, on every rank, what was written, index included.
    Raises CheckpointError on all ranks when any of them fails, with rank, file and reason; the folder is then the caller's
    to remove.
    """
    rank, votes = group.rank, Votes(group)
    views: dict[Key, Tensor] = {}

    def tell() -> Sequence[Any]:
        warn_of_overflow(tensors, dtype)
        told, here = hold(tensors)
        views.update(here)
        return told

    told = votes.all_do(tell)
    found = targets(merge(told, [f"rank {r}" for r in range(group.size)]), rows, tied, dtype)
    groups = _grouped(found, shard_bytes, index)
    begin = time.monotonic()
    if executor == "consolidate":
        return _by_shards(folder, found, groups, views, votes)
    files = lay_out_all(found, groups)
    owners = assign(files, found)
    with Output(folder, files, votes) as output:
        output.create(extent for extent, owner in owners.items() if owner == rank)
        _Exchange(files, found, owners, views, votes).run(output)
        records = output.finish()
    _report(files, begin)
    return records


def _grouped(found: Mapping[str, Target], shard_bytes: int, index: Mapping[str, str] | None) -> list[list[str]]:
    if not found:
        raise CheckpointError("there is nothing to export: no rank holds a tensor")
    if index is None:
        return divide(found, shard_bytes)
    unknown = [name for name in found if name not in index]
    if not unknown:
        return group_by(found, index)
    logger.warning(
        f"The index of the assets lacks {len(unknown)} of {len(found)} tensors (such as {unknown[0]}): the files of the "
        f"export hold {shard_bytes:,} bytes each instead of what it says"
    )
    return divide(found, shard_bytes)


class _Exchange:
    """What this rank writes and what it sends to others and gets from them, in rounds of ROUND extents for each rank."""

    def __init__(
        self,
        files: Sequence[FileLayout],
        found: Mapping[str, Target],
        owners: Mapping[ExtentId, int],
        views: Mapping[Key, Tensor],
        votes: Votes,
    ) -> None:
        self._views, self._votes = views, votes
        rank = self._rank = votes.group.rank
        counts: dict[int, int] = defaultdict(int)
        turn_of: dict[ExtentId, int] = {}
        self._mine: dict[int, list[ExtentId]] = defaultdict(list)
        for extent in extents_of(files):
            owner = owners[extent]
            turn_of[extent] = counts[owner] // ROUND
            counts[owner] += 1
            if owner == rank:
                self._mine[turn_of[extent]].append(extent)
        self._turns = max(turn_of.values()) + 1
        self._into: dict[ExtentId, list[Move]] = defaultdict(list)
        self._outgoing: dict[int, dict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))
        self._incoming: dict[int, dict[int, list[Move]]] = defaultdict(lambda: defaultdict(list))

        def giver(extent: ExtentId, part: Part) -> int | None:
            owner = owners[extent]
            holder = owner if owner in part.holders else part.holders[extent[1] % len(part.holders)]
            return holder if rank in (owner, holder) else None

        for move in moves(files, found, giver):
            owner, turn = owners[move.extent], turn_of[move.extent]
            if owner != rank:
                self._outgoing[turn][owner].append(move)
                continue
            self._into[move.extent].append(move)
            if move.holder != rank:
                self._incoming[turn][move.holder].append(move)
        self._posted: dict[int, list[Any]] = {}
        self._messages: dict[tuple[int, int], Tensor] = {}  # (turn, peer) -> what it sends
        self._arrived: dict[Move, Tensor] = {}
        self._failure: Exception | None = None

    def run(self, output: Output) -> None:
        """Fill and write all extents of this rank. Raises CheckpointError on all ranks when any fails."""
        buffer = torch.empty(EXTENT, dtype=torch.uint8)

        def write(turn: int) -> None:
            if self._failure is not None:
                raise self._failure
            for extent in self._mine[turn]:
                data = output.begin(extent, buffer)
                for move in self._into.get(extent, ()):
                    move.put(data, self._values(move))
                output.write(extent, data)

        self._post(0)
        try:
            in_rounds(self._votes, self._turns, write, self._exchange)
        except CheckpointError:  # all have stopped in the same turn, with the next one's messages on their way
            for turn in list(self._posted):
                self._complete(turn)
            raise

    def _values(self, move: Move) -> Tensor:
        return self._arrived[move] if move.holder != self._rank else move.read(self._views[move.key])

    def _exchange(self, turn: int) -> None:
        """The next turn's messages set out while this one's are written."""
        self._post(turn + 1)
        self._complete(turn)
        self._arrived = {}
        for peer, expected in self._incoming.pop(turn, {}).items():
            message = self._messages.pop((turn, peer))
            self._arrived.update(zip(expected, _unpack(message, expected), strict=True))

    def _post(self, turn: int) -> None:
        group = self._votes.group.group
        works = self._posted[turn] = []
        for peer, given in self._outgoing.pop(turn, {}).items():
            message = torch.empty(_length(given), dtype=torch.uint8)
            try:
                for move, place in zip(given, _unpack(message, given), strict=True):
                    place.copy_(move.read(self._views[move.key]))
            except RuntimeError as error:  # the peer waits for a message nevertheless
                self._failure = error
            works.append((dist.isend(message, group=group, group_dst=peer, tag=turn), message))
        for peer, expected in self._incoming.get(turn, {}).items():
            message = self._messages[turn, peer] = torch.empty(_length(expected), dtype=torch.uint8)
            works.append((dist.irecv(message, group=group, group_src=peer, tag=turn), message))

    def _complete(self, turn: int) -> None:
        for work, _ in self._posted.pop(turn):
            work.wait()


def _length(given: Sequence[Move]) -> int:
    return sum(-(-move.nbytes // _ALIGN) * _ALIGN for move in given)


def _unpack(message: Tensor, given: Sequence[Move]) -> list[Tensor]:
    """The place of each move's values in a message, in its dtype and shape."""
    places, begin = [], 0
    for move in given:
        places.append(message[begin : begin + move.nbytes].view(DTYPES[move.dtype]).view(move.shape))
        begin += -(-move.nbytes // _ALIGN) * _ALIGN
    return places


def _by_shards(
    folder: Path,
    found: Mapping[str, Target],
    groups: Sequence[Sequence[str]],
    views: Mapping[Key, Tensor],
    votes: Votes,
) -> dict[str, FileRecord]:
    """The executor `consolidate`: shards first, then whole files of them."""
    begin = time.monotonic()
    sharded = folder / "sharded"
    write_shards(sharded, found, views, votes)
    logger.info(f"Wrote the shards of the export to {sharded} in {time.monotonic() - begin:.2f} seconds")
    numbers = {name: number for number, names in enumerate(groups) for name in names}
    records = consolidate_together(sharded, folder, numbers, NUM_THREADS, votes)
    votes.leader_does(lambda: shutil.rmtree(sharded))
    return records


def _report(files: Sequence[FileLayout], begin: float) -> None:
    seconds, total = time.monotonic() - begin, sum(file.size for file in files)
    logger.info(
        f"Exported {total:,} bytes in {len(files)} files in {seconds:.2f} seconds ({total / seconds / 1e9:.2f} GB/s)"
    )
