"""Which updates are left out, when a run has halted, and where it was good last."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.resilience.numbers import BadNumbers, nonfinite_names

OK, BAD = 1.0, math.nan
CPU = torch.device("cpu")


def after(norms: list[float], limit: int, num_in_a_row: int = 0) -> tuple[BadNumbers[int], list[int]]:
    """The decisions over steps 1, 2, ... with these gradient norms; with a limit of 0 the policy is to stop."""
    section = Resilience(on_nonfinite="skip", max_nonfinite_in_a_row=limit) if limit else Resilience()
    numbers, left_out = BadNumbers(section, CPU, 0, {"nonfinite_in_a_row": num_in_a_row}), []
    for step, norm in enumerate(norms, start=1):
        left_out.append(int(numbers.gate(torch.tensor(norm))))
        numbers.passed(step)
    return numbers, left_out


@pytest.mark.parametrize(
    ("norms", "limit", "left_out", "last_good"),
    [
        ([OK, OK, OK], 0, [0, 0, 0], None),
        ([OK, BAD, OK], 0, [0, 1, 1], 1),  # stop: no weight changes any more
        ([BAD, OK, OK], 0, [1, 1, 1], 0),
        ([OK, math.inf, OK, BAD], 1, [0, 1, 0, 1], None),  # skip: never two in a row
        ([OK, BAD, -math.inf, OK], 1, [0, 1, 1, 1], 2),  # two: halted
        ([BAD, BAD, BAD, OK], 2, [1, 1, 1, 1], 2),
    ],
)
def test_what_is_left_out(norms: list[float], limit: int, left_out: list[int], last_good: int | None) -> None:
    numbers, decisions = after(norms, limit)
    assert (decisions, numbers.last_good()) == (left_out, last_good)


def test_the_host_learns_of_it_two_steps_later() -> None:
    numbers, heard = BadNumbers(Resilience(), CPU, 0, {}), []
    for step, norm in enumerate([OK, BAD, OK, OK], start=1):
        heard.append(numbers.have_halted())
        numbers.gate(torch.tensor(norm))
        numbers.passed(step)
    assert heard == [False, False, False, True]


def test_a_row_goes_on_where_a_checkpoint_ended() -> None:
    numbers, _ = after([OK, BAD, BAD], limit=2)
    assert numbers.state_dict() == {"nonfinite_in_a_row": 2}
    resumed, left_out = after([BAD], limit=2, num_in_a_row=2)
    assert (left_out, resumed.last_good(), resumed.state_dict()) == ([1], 0, {"nonfinite_in_a_row": 2})
    assert after([OK, BAD], limit=2, num_in_a_row=2)[0].last_good() is None


def test_spikes_of_the_norm_are_left_out_and_become_the_rule_when_they_stay() -> None:
    section = Resilience(on_spike="skip", spike_window=8, spike_threshold=5.0)
    draw = random.Random(1)
    norms = [draw.gauss(mean, mean / 20) for mean in [1] * 8 + [9, 1] + [9] * 16]
    expected = [0] * 8 + [1, 0] + [1] * 4 + [0] * 12  # five of the last eight are high then
    for stop in (9, 12):  # stopped and resumed there
        decisions, state = [], {}
        for part in (norms[:stop], norms[stop:]):
            numbers = BadNumbers(section, CPU, 0, state)
            for norm in part:
                decisions.append(int(numbers.gate(torch.tensor(norm))))
                numbers.passed(0)
            state = numbers.state_dict()
        assert decisions == expected
        assert numbers.last_good() is None


@pytest.mark.parametrize("num_before", [3, 8, 13])
def test_norms_of_steps_that_do_not_count_are_not_kept(num_before: int) -> None:
    """A run that halts is told two steps later; what it saves is where it was before, with the norms of then."""
    section = Resilience(on_spike="skip", spike_window=8)
    numbers, states = BadNumbers(section, CPU, 0, {}), []
    for step, norm in enumerate([*range(1, num_before + 1), BAD, 2.5, 3.5], start=1):
        numbers.gate(torch.tensor(float(norm)))
        numbers.passed(step)
        states.append(numbers.state_dict())
    kept = [float(norm) for norm in range(max(1, num_before - 7), num_before + 1)]
    assert states[num_before - 1] == {"nonfinite_in_a_row": 0, "grad_norms": kept}
    assert states[num_before:] == [states[num_before - 1]] * 3


def test_tensors_that_are_not_finite_are_named() -> None:
    named = {
        "fine": torch.ones(3),
        "large": torch.full((4,), 3e38),  # its norm overflows
        "nan": torch.tensor([1.0, math.nan]),
        "inf in bf16": torch.tensor([-math.inf], dtype=torch.bfloat16),
        "inf in float64": torch.tensor(math.inf, dtype=torch.float64),
        "empty": torch.empty(0),
        "integers": torch.arange(3),
    }
    assert nonfinite_names(named.items()) == ["nan", "inf in bf16", "inf in float64"]
