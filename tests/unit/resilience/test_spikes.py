"""What is a spike, how it ends, and what is told of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience.spikes import SpikeWatch, Window

CPU = torch.device("cpu")
SIZE = 16


def noise(seed: int = 1) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield 2 + draw.gauss(0, 0.1)


def test_the_limit_is_that_of_the_modified_z_score() -> None:
    window = Window(5, CPU)
    for value in (9.0, 1.0, 2.0, 3.0, 4.0, 10.0):  # the first has left the window
        assert window.limit(3.5) == math.inf or value == 10.0
        window.add(torch.tensor(value))
    # median 3, absolute deviations 2 1 0 1 7: MAD 1
    assert float(window.limit(3.5)) == pytest.approx(3 + 3.5 / 0.6745)
    assert window.tolist() == [1.0, 2.0, 3.0, 4.0, 10.0]
    window.add(torch.tensor(math.nan))
    assert window.tolist() == [2.0, 3.0, 4.0, 10.0, None]
    assert float(window.limit(1)) == pytest.approx(3 + 1 / 0.6745), "of the four that are left, the lower median"


def test_values_that_are_all_alike_leave_room_for_rounding() -> None:
    window = Window(5, CPU, [2.0] * 5)
    assert float(window.limit(8.0)) == pytest.approx(2.016)


def test_a_window_goes_on_where_its_values_were_kept() -> None:
    values, draw = [], noise()
    one = Window(SIZE, CPU)
    for _ in range(21):
        values.append(next(draw) if len(values) % 5 else math.inf)
        one.add(torch.tensor(values[-1]))
    other = Window(SIZE, CPU, one.tolist())
    for _ in range(9):
        value = torch.tensor(next(draw))
        one.add(value)
        other.add(value)
        assert one.limit(3) == other.limit(3) and one.tolist() == other.tolist()
    half = Window(SIZE, CPU, [1.0, 2.0])
    assert half.tolist() == [1.0, 2.0] and not half.is_full
    shorter = Window(3, CPU, [1.0, 2.0, 3.0, 4.0])
    shorter.add(torch.tensor(5.0))
    assert shorter.tolist() == [3.0, 4.0, 5.0]


class Told:
    """What a watch tells, and which pins it holds."""

    def __init__(self, **section: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pinned: list[int] = []
        self.bundles: list[tuple[int, list[str]]] = []
        settings = Resilience(spike_window=SIZE, **section)
        self.watch = SpikeWatch(settings, self._tell, self._pin, self._bundle)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def _bundle(self, row: Mapping[str, Any], limits: dict[str, float]) -> None:
        assert all(row[quantity] > limit for quantity, limit in limits.items())
        self.bundles.append((row["step"], list(limits)))

    def _pin(self, step: int) -> Callable[[], None]:
        self.pinned.append(step)
        return lambda: self.pinned.remove(step)

    def see(self, losses: list[float]) -> None:
        draw = noise(2)
        self.watch.look({"step": i, "loss": loss, "grad_norm": next(draw)} for i, loss in enumerate(losses, 1))


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
def test_how_a_spike_ends(spike: list[float], kind: str, steps: int, is_pinned: bool) -> None:
    told = Told()
    told.see(losses(spike))
    (begin, first), (end, last) = told.events[:2]
    assert (begin, first["step"], first["quantity"]) == ("spike", 21, "loss")
    assert (end, last["began"], last["steps"], last["how"]) == ("spike_end", 21, steps, kind)
    assert len(told.events) == 2, "a divergence begins a new window"
    assert told.pinned == [21] * is_pinned
    assert told.bundles == [(21, ["loss"])]


def test_neither_noise_nor_a_fall_is_a_spike_and_none_are_found_when_switched_off() -> None:
    told = Told()
    told.see([5 * 0.99**step + value for step, value in zip(range(300), noise(), strict=False)])
    assert told.events == []
    off = Told(spike_threshold=0.0)
    off.see(losses([9.0]))
    assert off.events == []


def test_no_more_than_the_first_window_is_without_judgement() -> None:
    told = Told()
    told.see([1e9, *(value for value, _ in zip(noise(), range(SIZE - 1), strict=False)), 50.0])
    assert [(kind, fields["step"]) for kind, fields in told.events] == [("spike", SIZE + 1)]
