"""Which updates are left out, when a run has halted, and where it was good last."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_like.resilience.numbers import BadNumbers

OK, BAD = 1.0, math.nan


def after(norms: list[float], limit: int, num_in_a_row: int = 0) -> tuple[BadNumbers[int], list[int]]:
    """The decisions over steps 1, 2, ... with these gradient norms."""
    numbers = BadNumbers(limit, torch.device("cpu"), 0, num_in_a_row)
    left_out = []
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
    numbers, heard = BadNumbers(0, torch.device("cpu"), 0), []
    for step, norm in enumerate([OK, BAD, OK, OK], start=1):
        heard.append(numbers.have_halted())
        numbers.gate(torch.tensor(norm))
        numbers.passed(step)
    assert heard == [False, False, False, True]


def test_a_row_goes_on_where_a_checkpoint_ended() -> None:
    numbers, _ = after([OK, BAD, BAD], limit=2)
    assert numbers.num_in_a_row() == 2
    resumed, left_out = after([BAD], limit=2, num_in_a_row=2)
    assert (left_out, resumed.last_good(), resumed.num_in_a_row()) == ([1], 0, 2)
    assert after([OK, BAD], limit=2, num_in_a_row=2)[0].last_good() is None
