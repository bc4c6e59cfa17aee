"""Manual garbage collection runs at the due steps, collects all generations, and is undone."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch

from torchtitan_like.monitor.garbage import GarbageCollection, describe_objects


class Node:
    """An object in a reference cycle."""

    def __init__(self) -> None:
        self.cycle: Node | None = self


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    yield
    gc.set_debug(0)
    gc.unfreeze()
    gc.enable()


def old_cycle() -> weakref.ref[Node]:
    """Make an unreachable cycle in the oldest generation."""
    node = Node()
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(node)


def test_a_due_step_frees_cycles_of_the_oldest_generation() -> None:
    collector = GarbageCollection(freq=5)
    reference = old_cycle()
    for step in range(1, 5):
        collector.run(step)
        gc.collect(1)  # as TorchTitan 0.2 does: it never reaches the oldest generation
    assert reference() is not None, "a collection of young generations freed the cycle"
    collector.run(5)
    assert reference() is None


@pytest.mark.parametrize(
    ("freq", "due"),
    [(1, [2, 3, 4, 5, 6]), (2, [2, 4, 6]), (5, [5]), (50, []), (0, [])],
)
def test_collections_run_at_multiples_of_freq_after_the_first_step(
    freq: int, due: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    collector = GarbageCollection(freq)
    collected = []
    for step in range(1, 7):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            collector.run(step)
        if "[GC]" in caplog.text:
            collected.append(step)
    assert collected == due


def test_log_line_names_reason_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 0.5, 10.0, 11.25])
    collector = GarbageCollection(10, clock=lambda: next(times))
    with caplog.at_level(logging.INFO):
        collector.collect("After the checkpoint")
    assert caplog.messages == ["[GC] After the checkpoint 1.25 seconds"]


@pytest.mark.parametrize(("freq", "enabled"), [(50, False), (0, True)])
def test_automatic_collection_is_disabled_and_restored(freq: int, enabled: bool) -> None:
    gc.disable()  # the package disables it during the imports
    collector = GarbageCollection(freq)
    assert gc.isenabled() is enabled
    frozen_at_start = gc.get_freeze_count()
    # Frozen objects of the imported modules are not scanned again.
    assert (frozen_at_start > 100_000) is not enabled
    built: list[list[int]] = [[] for _ in range(1000)]
    collector.freeze()
    assert (gc.get_freeze_count() >= frozen_at_start + len(built)) is not enabled
    collector.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0 or freq == 0


def test_cycles_made_after_freezing_are_still_freed() -> None:
    collector = GarbageCollection(2)
    collector.freeze()
    reference = old_cycle()
    collector.run(2)
    assert reference() is None


def test_debug_reports_cycles_with_their_tensors_and_frees_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = GarbageCollection(50, debug=True)
    node = Node()
    node.tensor = torch.zeros(3, 5)  # type: ignore[attr-defined]
    reference = weakref.ref(node)
    del node
    with caplog.at_level(logging.INFO):
        collector.run(1)
    assert reference() is None and gc.garbage == [] and gc.get_debug() == 0
    assert "1 Node" in caplog.text and "1 tensors of 60 bytes, shapes (3, 5)" in caplog.text
    assert describe_objects([]) == "no reference cycles"
