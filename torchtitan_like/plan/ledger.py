"""Add up the memory of a recording: what is alive, what it is, and when it is most."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from torchtitan_like.plan.allocator import replay
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.fusion import fused_memory
from torchtitan_like.plan.record import Alloc, Category, Recording
from torchtitan_like.process_start import has_expandable_segments
from torchtitan_like.util.plan_file import ModuleBytes


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are alive.

    alloc: the allocation that reaches the peak. index: of its event. by_category: live bytes.
    """

    num_bytes: int
    alloc: Alloc
    index: int
    by_category: dict[Category, int]


def find_peak(recording: Recording, *, is_host: bool = False) -> Peak | None:
    """Return the peak of active bytes; None if nothing was allocated."""
    last = recording.marks[-1].num_events if recording.marks else len(recording.events)
    sizes: dict[int, int] = {}
    total = most = 0
    at = -1
    for index, event in enumerate(recording.events[:last]):
        if not isinstance(event, Alloc):
            total -= sizes.pop(event.id, 0)
        elif event.is_host == is_host:
            sizes[event.id] = event.num_bytes
            total += event.num_bytes
            if total > most:
                most, at = total, index
    if at < 0:
        return None
    alive: dict[int, Alloc] = {}
    for event in recording.events[: at + 1]:
        if not isinstance(event, Alloc):
            alive.pop(event.id, None)
        elif event.is_host == is_host:
            alive[event.id] = event
    by_category: Counter[Category] = Counter()
    for alloc in alive.values():
        by_category[recording.category(alloc)] += alloc.num_bytes
    reached = recording.events[at]
    assert isinstance(reached, Alloc)
    return Peak(most, reached, at, dict(by_category.most_common()))


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, in bytes.

    stage: pipeline rank. reserved: of the allocator. active: peak of live bytes, rounded as the
    allocator does. by_category: live bytes at the peak. moment: when it is reached, in words.
    by_stream: reserved bytes of each stream's pools. host: peak of the host's tensors.
    modules: bytes that stay between steps.
    """

    rank: int
    stage: int
    reserved: int
    active: int
    by_category: dict[Category, int]
    moment: str
    by_stream: dict[str, int]
    host: int
    modules: ModuleBytes

    @property
    def fragmentation(self) -> int:
        """Reserved bytes that hold no tensor at the peak: rounding, and pools of other streams."""
        return self.reserved - sum(self.by_category.values())


def memory_of(run: DryRun, *, device_type: str = "cuda", fuses: bool = False) -> RankMemory:
    """Add up the memory of a dry run.

    device_type: a CPU reserves what is alive. A GPU's allocator has the settings of this process's
    environment, as a run started here. fuses: with compiled blocks (`fused_memory`).
    """
    recording = fused_memory(run.recording) if fuses else run.recording
    peak, host = find_peak(recording), find_peak(recording, is_host=True)
    assert peak is not None  # a model has parameters
    if device_type == "cuda":
        allocator = replay(recording, is_expandable=has_expandable_segments(os.environ))
        reserved, active, by_stream = allocator.num_bytes, allocator.active, allocator.by_stream
    else:
        reserved, active, by_stream = peak.num_bytes, peak.num_bytes, {}
    return RankMemory(
        run.rank,
        run.dims.coordinate("pp", run.rank),
        reserved,
        active,
        peak.by_category,
        describe_moment(recording, peak),
        by_stream,
        0 if host is None else host.num_bytes,
        run.modules,
    )


def describe_moment(recording: Recording, peak: Peak) -> str:
    """Return when and in which module a peak is reached, such as `step 1, backward of layers.3`."""
    phase = next(mark.name for mark in recording.marks if peak.index < mark.num_events)
    alloc = peak.alloc
    if not phase.startswith("step"):
        return f"building the {phase}"
    place = f"{alloc.pass_} of {alloc.module}" if alloc.module else alloc.pass_
    return f"{phase}, {place} ({alloc.op})"
