"""Say what torch.compile changes in a recording, which is always of the eager model.

A compiled block leaves out what nothing reads (`find_needed`). Inductor turns its kernels that are
limited by bandwidth into few ones (`fused_bytes`), and keeps fewer of their results in memory
(`fused_memory`).
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from torchtitan_like.plan.record import (
    COMPUTE,
    Alloc,
    Category,
    Free,
    Recording,
    WorkItem,
)

# ---- work


def find_needed(
    recording: Recording, first_copy: Mapping[int, int] = MappingProxyType({})
) -> list[bool]:
    """Return for each item whether anything needs its results; True outside of compiled blocks.

    With full checkpointing, nothing reads the last product of a recomputed block, nor what
    tensor-parallel ranks scatter of it. first_copy: results that are read in place of others, as
    `find_repeated` returns them.
    """
    freed = {event.id for event in recording.events if isinstance(event, Free)}
    needed = [True] * len(recording.work)
    read = {0}
    for index in reversed(range(len(recording.work))):
        item = recording.work[index]
        if item.writes and _is_in_graph(item):
            written = [storage for storage, _ in item.writes]
            needed[index] = any(storage in read or storage not in freed for storage in written)
        if needed[index]:
            read.update(first_copy.get(storage, storage) for storage, _ in item.reads)
    return needed


def _is_in_graph(item: WorkItem) -> bool:
    """Return True for work of a compiled block that has no other effect than its results."""
    if item.kind in ("matmul", "attention", "collective"):
        return bool(_block_of(item)) and item.pass_ != "update"
    return _is_compiled(item)


# ---- kernels

FEW_BYTES = 64  # of the result of a reduction of a whole tensor

# Kernels that a compiler does not fuse with their neighbors; nor those with complex numbers.
_NOT_FUSED = ("embedding", "_fused_adam", "_foreach", "split_with_sizes_copy", "_chunk_cat")


def fused_bytes(recording: Recording) -> dict[int, int]:
    """Return by index the bytes of items that compiled blocks do not run as the eager model does.

    Between two matrix products, attentions, collectives or waits, all such kernels become one. It
    reads what exists before, and writes what is alive after it. It is the last of them; the others
    get 0 bytes. A reduction to a few numbers, such as float8's largest value, ends a kernel: the
    next one reads its input again. What a block computes twice is computed once, and what nothing
    needs not at all: of products and collectives, only these are listed, with 0 bytes. The optimizer
    and other streams are not compiled.
    """
    repeated, first_copy = find_repeated(recording)
    needed = find_needed(recording, first_copy)
    freed_at = {event.id: event.at for event in recording.events if isinstance(event, Free)}
    for index, item in enumerate(recording.work):
        if index not in repeated:
            for storage, _ in item.reads:
                if storage in first_copy:  # the first copy is read in its place
                    first = first_copy[storage]
                    freed_at[first] = max(freed_at.get(first, 0), index + 1)
    fused: dict[int, int] = {}
    run: list[int] = []

    def close() -> None:
        if not run:
            return
        written: dict[int, int] = {}
        read: dict[int, int] = {}
        for index in run:
            item = recording.work[index]
            for storage, num_bytes in item.reads:
                storage = first_copy.get(storage, storage)
                if storage not in written or storage == 0:
                    read[storage] = max(read.get(storage, 0), num_bytes)
            for storage, num_bytes in item.writes:
                written[storage] = max(written.get(storage, 0), num_bytes)
        end = run[-1] + 1
        kept = (n for storage, n in written.items() if freed_at.get(storage, end + 1) > end)
        fused.update(dict.fromkeys(run, 0))
        fused[run[-1]] = sum(read.values()) + sum(kept)
        run.clear()

    for index, item in enumerate(recording.work):
        if item.stream != COMPUTE:
            continue
        if index in repeated or not needed[index]:
            fused[index] = 0
        elif _is_compiled(item):
            run.append(index)
            if item.writes and max(size for _, size in item.writes) <= FEW_BYTES:
                close()
        else:
            close()
    close()
    return fused


def _is_compiled(item: WorkItem) -> bool:
    is_block = item.pass_ != "update" and item.module.startswith("layers.")
    has_code = not item.op.startswith(_NOT_FUSED) and not item.dtype.startswith("complex")
    return item.kind == "memory" and is_block and has_code


def find_repeated(recording: Recording) -> tuple[set[int], dict[int, int]]:
    """Return the kernels that compute again what their block has, and their results' first copies.

    A compiled block computes an expression once: three projections of one input cast it to float8
    once. Backward and the recomputation before it are one graph. Views are told apart only by their
    size, so only kernels that read whole tensors count. A result that is changed in place is not the
    same as its first copy.
    """
    sizes = {event.id: event.num_bytes for event in recording.events if isinstance(event, Alloc)}
    changed = {
        storage for item in recording.work if item.op.endswith("_") for storage, _ in item.writes
    }
    repeated: set[int] = set()
    first_copy: dict[int, int] = {}
    versions: Counter[int] = Counter()  # changes in place
    known: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}
    graph = ("", False)
    for index, item in enumerate(recording.work):
        if item.stream != COMPUTE or not _is_compiled(item):
            continue
        now = _block_of(item), item.pass_ == "forward"
        if now != graph:
            graph = now
            known.clear()
        if item.op.endswith("_"):
            versions.update(storage for storage, _ in item.writes)
            continue
        if not item.writes or any(sizes.get(s) != n for s, n in (*item.reads, *item.writes)):
            continue
        if any(storage in changed for storage, _ in item.writes):
            continue
        operands = [first_copy.get(storage, storage) for storage, _ in item.reads]
        key = (
            item.op,
            *((operand, versions[operand]) for operand in operands),
            *(num_bytes for _, num_bytes in item.writes),
        )
        results = known.setdefault(key, item.writes)
        if results is not item.writes:
            repeated.add(index)
            first_copy |= {
                storage: first
                for (storage, _), (first, _) in zip(item.writes, results, strict=True)
            }
    return repeated, first_copy


# ---- memory

# Of the results of a block's kernels.
_RESULTS: tuple[Category, ...] = ("activations", "activation gradients", "communication buffers")


def fused_memory(recording: Recording) -> Recording:
    """Return a recording whose compiled blocks keep their results no longer than they need them.

    - A result that nothing reads, or only the rest of its kernel, is never in memory.
    - A later kernel of the block computes it again if the operands are in memory. So the backward
      applies an activation function again, and the forward saves only its operand.
    - A result ends with its last use. Per-op checkpointing saves the result of every listed
      operator, and a compiled block only those that the backward reads.

    This is what torch's partitioner does (min_cut_rematerialization_partition in
    torch/_functorch/partitioners.py), as far as tests compare the bytes that a block saves. The
    work stays that of the eager model.
    """
    ends = _ends_of_results(recording)
    early = deque(sorted((end, identity) for identity, end in ends.items() if end >= 0))
    fused = copy.copy(recording)
    fused.events = []
    num_before = []  # events of `fused` before each event of the recording
    for event in recording.events:
        while early and early[0][0] <= event.at:
            end, identity = early.popleft()
            fused.events.append(Free(identity, end))
        num_before.append(len(fused.events))
        if event.id not in ends or (isinstance(event, Alloc) and ends[event.id] >= 0):
            fused.events.append(event)
    num_before.append(len(fused.events))
    fused.marks = [
        mark._replace(num_events=num_before[mark.num_events]) for mark in recording.marks
    ]
    return fused


def _ends_of_results(recording: Recording) -> dict[int, int]:
    """Return by id the results that end earlier than in the eager model.

    The value is the number of work items after which one ends; -1 if it is never in memory.
    """
    work = recording.work
    freed_at = {event.id: event.at for event in recording.events if isinstance(event, Free)}
    kernel_ends = [
        index
        for index, item in enumerate(work)
        if item.stream == COMPUTE and not _is_compiled(item)
    ]
    writers: dict[int, list[int]] = defaultdict(list)
    uses: dict[int, list[int]] = defaultdict(list)
    needed = find_needed(recording)
    for index, is_needed in enumerate(needed):
        for storage, _ in work[index].writes:
            writers[storage].append(index)
        for storage, _ in work[index].reads if is_needed else ():
            uses[storage].append(index)

    def is_in_memory(storage: int, writer: int, use: int) -> bool:
        """Whether `use` finds in memory what `writer` read."""
        is_unchanged = all(index <= writer for index in writers[storage])
        return storage == 0 or (is_unchanged and freed_at.get(storage, math.inf) > use)

    @cache
    def can_recompute(storage: int, use: int) -> bool:
        """Whether `use` can compute a result from what is in memory, in one or several steps."""
        if len(writers[storage]) != 1:
            return False
        writer = writers[storage][0]
        is_same_block = _block_of(work[writer]) == _block_of(work[use])
        if not is_same_block or not _is_compiled(work[writer]) or not _is_compiled(work[use]):
            return False
        return all(
            is_in_memory(operand, writer, use) or can_recompute(operand, use)
            for operand, _ in work[writer].reads
            if operand != storage  # an argument `out`, which is only written
        )

    def is_same_kernel(writer: int, use: int) -> bool:
        is_compiled = _is_compiled(work[writer]) and _is_compiled(work[use])
        return is_compiled and bisect_right(kernel_ends, writer) == bisect_right(kernel_ends, use)

    ends: dict[int, int] = {}
    for event in reversed(recording.events):  # so that the uses of an operand are complete
        if not isinstance(event, Alloc) or not _is_result(event, recording):
            continue
        if event.id not in freed_at or len(writers[event.id]) != 1:
            continue
        writer = writers[event.id][0]
        block = _block_of(work[writer])
        later = [use for use in uses[event.id] if use > writer]
        if not block or any(_block_of(work[use]) != block for use in later):
            continue
        last = -1 if _is_compiled(work[writer]) or not needed[writer] else writer
        for use in later:
            if is_same_kernel(writer, use):
                continue
            if can_recompute(event.id, use):
                for operand, _ in work[writer].reads:
                    uses[operand].append(use)
            else:
                last = max(last, use)
        if last + 1 < freed_at[event.id]:
            ends[event.id] = last + 1 if last >= 0 else -1
    return ends


def _is_result(event: Alloc, recording: Recording) -> bool:
    is_resized = event.op == "resize_"  # FSDP2's gathered weights
    return recording.category(event) in _RESULTS and not event.is_host and not is_resized


def _block_of(item: WorkItem) -> str:
    """Return the fqn of an item's block; "" outside of the blocks."""
    is_block = item.stream == COMPUTE and item.module.startswith("layers.")
    return ".".join(item.module.split(".")[:2]) if is_block else ""
