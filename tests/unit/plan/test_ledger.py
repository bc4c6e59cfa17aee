"""The ledger adds up what is alive, and finds when it is most."""

from __future__ import annotations

import pytest

from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.plan.dry_run import DryRun
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.ledger import describe_moment, find_peak, memory_of
from torchtitan_like.plan.plan_report import allocator_note
from torchtitan_like.plan.record import Alloc, Category, Free, Recording
from torchtitan_like.process_start import ALLOCATOR
from torchtitan_like.util.units import MIB


def alloc(
    number: int, size: int, category: Category, module: str = "", host: bool = False
) -> Alloc:
    return Alloc(number, size, 0, category, "mm", module, "backward", host, 0)


def example() -> Recording:
    recording = Recording()
    recording.events = [alloc(1, 100, "parameters")]
    recording.mark("model")
    recording.events += [
        alloc(2, 30, "activations"),
        alloc(3, 70, "activations", "layers.1"),
        alloc(4, 1000, "other", host=True),
        Free(2, 0),
        Free(9, 0),  # allocated before the recording
    ]
    recording.categories[3] = "gradients"
    recording.mark("step 1")
    recording.events += [Free(1, 0), Free(3, 0)]  # the end of the process
    return recording


def test_peak_has_its_categories_and_its_moment() -> None:
    recording = example()
    peak = find_peak(recording)
    assert peak is not None
    assert peak.num_bytes == 200
    assert peak.by_category == {"parameters": 100, "gradients": 70, "activations": 30}
    assert describe_moment(recording, peak) == "step 1, backward of layers.1 (mm)"


def test_nothing_allocated_has_no_peak() -> None:
    assert find_peak(Recording()) is None


@pytest.mark.parametrize(
    ("variables", "reserved", "note"),
    [
        ({}, 40, "has expandable segments"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, 40, "has expandable segments"),
        ({"PYTORCH_ALLOC_CONF": ""}, 80, "has no expandable segments"),
    ],
)
def test_the_allocator_is_that_of_a_run_with_this_environment(
    variables: dict[str, str], reserved: int, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    recording = Recording()
    halves = [alloc(number, 20 * MIB, "activations") for number in (1, 2)]
    recording.events = [*halves, Free(1, 0), Free(2, 0), alloc(3, 40 * MIB, "activations")]
    recording.mark("step 1")
    memory = memory_of(DryRun(0, ParallelDims(1), recording, {}))
    assert memory.reserved == reserved * MIB
    assert note in allocator_note(load_gpu("h100-80g"))[0]
