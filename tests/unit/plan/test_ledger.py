"""The ledger adds up what is alive, and finds when it is most."""

from __future__ import annotations

from torchtitan_like.plan.ledger import describe_moment, find_peak
from torchtitan_like.plan.record import Alloc, Category, Free, Recording


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
