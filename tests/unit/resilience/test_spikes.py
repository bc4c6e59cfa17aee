"""Spikes are detected, classified and recorded as events and replay bundles."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience.spikes import SpikeDetector, SpikeWindow

CPU = torch.device("cpu")
SIZE = 16


def noise(seed: int = 1) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield 2 + draw.gauss(0, 0.1)


def test_the_limit_is_a_modified_z_score() -> None:
    window = SpikeWindow(5, CPU)
    for value in (9.0, 1.0, 2.0, 3.0, 4.0, 10.0):  # the last value replaces the first
        assert window.limit(3.5) == math.inf or value == 10.0
        window.add(torch.tensor(value))
    # median 3, absolute deviations 2 1 0 1 7: MAD 1
    assert float(window.limit(3.5)) == pytest.approx(3 + 3.5 / 0.6745)
    assert window.tolist() == [1.0, 2.0, 3.0, 4.0, 10.0]
    window.add(torch.tensor(math.nan))
    assert window.tolist() == [2.0, 3.0, 4.0, 10.0, None]
    assert float(window.limit(1)) == pytest.approx(3 + 1 / 0.6745), (
        "the lower median of the four finite values"
    )


def test_the_limit_of_equal_values_allows_rounding() -> None:
    window = SpikeWindow(5, CPU, [2.0] * 5)
    assert float(window.limit(8.0)) == pytest.approx(2.016)


def test_a_window_continues_from_saved_values() -> None:
    values, draw = [], noise()
    window = SpikeWindow(SIZE, CPU)
    for _ in range(21):
        values.append(next(draw) if len(values) % 5 else math.inf)
        window.add(torch.tensor(values[-1]))
    restored = SpikeWindow(SIZE, CPU, window.tolist())
    for _ in range(9):
        value = torch.tensor(next(draw))
        window.add(value)
        restored.add(value)
        assert window.limit(3) == restored.limit(3) and window.tolist() == restored.tolist()
    partial = SpikeWindow(SIZE, CPU, [1.0, 2.0])
    assert partial.tolist() == [1.0, 2.0] and not partial.is_full
    shorter = SpikeWindow(3, CPU, [1.0, 2.0, 3.0, 4.0])
    shorter.add(torch.tensor(5.0))
    assert shorter.tolist() == [3.0, 4.0, 5.0]


class Recorder:
    """Records the events, pins and bundles of a detector."""

    def __init__(self, **section: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pinned: list[int] = []
        self.bundles: list[tuple[int, list[str]]] = []
        settings = Resilience(spike_window=SIZE, **section)
        self.detector = SpikeDetector(settings, self._write_event, self._pin, self._write_bundle)

    def _write_event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def _write_bundle(self, row: Mapping[str, Any], limits: dict[str, float]) -> None:
        assert all(row[quantity] > limit for quantity, limit in limits.items())
        self.bundles.append((row["step"], list(limits)))

    def _pin(self, step: int) -> Callable[[], None]:
        self.pinned.append(step)
        return lambda: self.pinned.remove(step)

    def observe(self, losses: list[float]) -> None:
        draw = noise(2)
        self.detector.observe(
            {"step": i, "loss": loss, "grad_norm": next(draw)} for i, loss in enumerate(losses, 1)
        )


def losses(spike: list[float], after: int = 30) -> list[float]:
    draw = noise()
    return [next(draw) for _ in range(20)] + spike + [next(draw) for _ in range(after)]


@pytest.mark.parametrize(
    ("spike", "kind", "steps", "is_pinned"),
    [
        ([9.0], "fast", 1, False),
        ([9.0, math.inf], "fast", 2, False),
        ([9.0, 8.0, 7.0], "slow", 3, True),
        ([9.0] * 16, "slow", 16, True),
        ([9.0, math.nan] * 20, "divergence", 16, True),
    ],
)
def test_the_end_of_a_spike_is_classified(
    spike: list[float], kind: str, steps: int, is_pinned: bool
) -> None:
    recorder = Recorder()
    recorder.observe(losses(spike))
    (start_event, start), (end_event, end) = recorder.events[:2]
    assert (start_event, start["step"], start["quantity"]) == ("spike", 21, "loss")
    assert (end_event, end["began"], end["steps"], end["how"]) == ("spike_end", 21, steps, kind)
    assert len(recorder.events) == 2, "a divergence did not start a new window"
    assert recorder.pinned == [21] * is_pinned
    assert recorder.bundles == [(21, ["loss"])]


def test_noise_and_a_decreasing_loss_are_not_spikes_and_threshold_0_disables_detection() -> None:
    recorder = Recorder()
    recorder.observe(
        [5 * 0.99**step + value for step, value in zip(range(300), noise(), strict=False)]
    )
    assert recorder.events == []
    disabled = Recorder(spike_threshold=0.0)
    disabled.observe(losses([9.0]))
    assert disabled.events == []


def test_a_spike_can_follow_the_first_full_window() -> None:
    recorder = Recorder()
    recorder.observe(
        [1e9, *(value for value, _ in zip(noise(), range(SIZE - 1), strict=False)), 50.0]
    )
    assert [(kind, fields["step"]) for kind, fields in recorder.events] == [("spike", SIZE + 1)]
