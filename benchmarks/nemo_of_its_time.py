"""Time a published NeMo run with what Megatron-Core and Transformer Engine do otherwise.

The planner describes this package's trainer. Published NeMo rows ran on another stack. What it does
otherwise, with sources; nothing is fitted:

- Weights stay whole, and only optimizer states are sharded. So weights are gathered, and gradients
  scattered, once a step, in contiguous buffers (Megatron Core user guide, "Distributed Optimizer").
- Gradients are added up by the matrix products (`gradient_accumulation_fusion` of Megatron Core).
- float8 scales come from earlier steps, so no kernel reads a tensor for its largest value
  (Transformer Engine user guide, "FP8 Delayed Scaling"). Weights are cast once a step
  (`is_first_microbatch`), and the backward reads the casts of the forward.
"""

from __future__ import annotations

import copy

from torchtitan_like.plan.fusion import FEW_BYTES
from torchtitan_like.plan.record import Recording, WorkItem

# What FSDP2 copies into and out of its buffers.
_FSDP_COPIES = ("split_with_sizes_copy", "all_gather_copy_in", "chunk_cat", "_foreach_copy_")


def as_nemo(recording: Recording) -> Recording:
    """Return a recording without the work that NeMo does not have. Its memory is not changed."""
    dropped = _sharding(recording) | _casts(recording)
    result = copy.copy(recording)
    result.work = [
        _without_scales(nothing(item) if index in dropped else item)
        for index, item in enumerate(recording.work)
    ]
    return result


def nothing(item: WorkItem) -> WorkItem:
    """Return an item in place of one that a stack does not have; it takes no time.

    Its stream is its own, so that kernels before and after it become one. What it reads stays needed.
    """
    return WorkItem("wait", "nothing", -1, "", "forward", reads=item.reads)


def _without_scales(item: WorkItem) -> WorkItem:
    """Return an item that reads no scales, so that two casts of the same tensor are equal."""
    return item._replace(reads=tuple(read for read in item.reads if read[1] > FEW_BYTES))


def _sharding(recording: Recording) -> set[int]:
    """Return FSDP2's copies, the sums of gradients, and what is gathered or scattered again.

    With a pipeline, weights are gathered and gradients scattered once a step already.
    """
    has_stages = bool(recording.actions)
    starts = recording.micro_batches
    dropped = set()
    for index, item in enumerate(recording.work):
        if item.op.startswith(_FSDP_COPIES) or item.op == "add_" and item.pass_ == "backward":
            dropped.add(index)
        elif item.kind == "collective" and _is_of_data_parallel(item) and not has_stages:
            is_gather = item.pass_ == "forward" and index < starts[1]
            is_scatter = item.pass_ == "backward" and "scatter" in item.op and index >= starts[-1]
            if not is_gather and not is_scatter and item.pass_ != "update":
                dropped.add(index)
    return dropped


def _is_of_data_parallel(item: WorkItem) -> bool:
    assert item.group is not None
    return item.group.dimension not in ("tp", "cp", "pp")


def _casts(recording: Recording) -> set[int]:
    """Return float8's scales, the casts of weights, and the backward's casts of saved inputs.

    Without a pipeline, the first micro-batch keeps its casts of weights. A pipeline has so many
    micro-batches that these casts do not count.
    """
    second = recording.micro_batches[1] if not recording.actions else 0
    dropped: set[int] = set()
    weights: set[int] = set()  # gathered, and their casts
    saved: set[int] = set()  # results of the forward, and their casts
    for index, item in enumerate(recording.work):
        written = [storage for storage, _ in item.writes]
        if item.op.startswith("split_with_sizes_copy"):  # from the buffer into the weights
            weights.update(storage for storage, _ in item.reads[1:])
            continue
        if item.pass_ == "forward":
            saved.update(written)
        if item.kind != "memory" or not item.module.startswith("layers.") or not written:
            continue
        if max(size for _, size in item.writes) <= FEW_BYTES:
            dropped.add(index)
            continue
        read = {storage for storage, size in item.reads if size > FEW_BYTES}
        if read and read <= weights:
            weights.update(written)
            if item.pass_ != "forward" or index >= second:
                dropped.add(index)
        elif item.pass_ == "backward" and read and read <= saved | weights:
            saved.update(written)
            dropped.add(index)
    return dropped
