"""Time a published TorchTitan run with the gathers of its float8 tensor parallelism.

This package's trainer gathers the inputs of float8 layers in bfloat16, and each layer casts what it
has. TorchTitan casts each rank's part first, gathers one byte for each number, and all layers share
the cast (torchao/float8/float8_tensor_parallel.py, `Float8ColwiseParallel` and
`Float8RowwiseParallel`; parallelize_llama.py since PR 393). So it gathers inputs in the forward, and
gradients of outputs in the backward. It does so for scales of whole tensors only.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from benchmarks.nemo_of_its_time import nothing
from torchtitan_like.plan.record import Recording, WorkItem

Row = dict[str, str]


def has_float8_gathers(row: Row) -> bool:
    """Return whether tensor-parallel ranks of a row gathered float8."""
    is_of_tensors = row["precision"].startswith("fp8") and "rowwise" not in row["precision"]
    return row["framework"] == "torchtitan" and int(row["tp"]) > 1 and is_of_tensors


class _Cast(NamedTuple):
    """What a tensor is on the way to float8.

    gathered: the tensor that is cast. number: of this cast of it. num_ranks: that have its parts.
    """

    gathered: int
    number: int
    num_ranks: int


def with_float8_gathers(recording: Recording) -> Recording:
    """Return a recording of blocks that cast each part once, then gather it. Memory does not change."""
    result = copy.copy(recording)
    result.work = list(recording.work)
    casts: dict[int, _Cast] = {}  # by storage
    copied: set[tuple[int, str]] = set()  # gathered tensors whose cast was transposed, by pass
    for index, item in enumerate(recording.work):
        if not item.module.startswith("layers."):
            continue
        written = [storage for storage, _ in item.writes]
        if item.kind == "collective" and item.op.startswith("all_gather"):
            assert item.group is not None
            if item.group.dimension == "tp":
                casts |= {storage: _Cast(storage, 0, item.group.size) for storage in written}
                result.work[index] = _divided(item, 2)
            continue
        cast = next((casts[storage] for storage, _ in item.reads if storage in casts), None)
        if cast is None or item.kind != "memory":
            continue
        if item.op == "cat" and cast.number == 0:  # of the gathered parts
            casts |= {storage: _Cast(storage, 0, cast.num_ranks) for storage in written}
            result.work[index] = _divided(item, 2)
        elif item.op == "clone":  # the transposed cast, for the gradient of a weight
            is_first = (cast.gathered, item.pass_) not in copied
            copied.add((cast.gathered, item.pass_))
            result.work[index] = item if is_first else nothing(item)
        else:
            if item.op == "abs":  # the beginning of a cast
                casts[cast.gathered] = cast = cast._replace(number=casts[cast.gathered].number + 1)
            casts |= dict.fromkeys(written, cast)
            result.work[index] = (
                _divided(item, cast.num_ranks) if cast.number == 1 else nothing(item)
            )
    return result


def _divided(item: WorkItem, by: int) -> WorkItem:
    """Return an item that reads and writes a part of its bytes."""
    return item._replace(
        num_bytes=item.num_bytes // by,
        reads=tuple((storage, size // by) for storage, size in item.reads),
        writes=tuple((storage, size // by) for storage, size in item.writes),
    )
