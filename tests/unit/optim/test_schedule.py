"""The learning rate is a function of the step and the horizon, not of the length of the run."""

from types import SimpleNamespace

import pytest

from torchtitan_like.optim.schedule import build_schedule


def section(**changes):
    defaults = {
        "warmup_steps": 2,
        "total_steps": None,
        "decay_ratio": None,
        "name": "wsd",
        "decay_type": "linear",
        "min_lr_factor": 0.0,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({}, 6, {1: 0.5, 2: 1.0, 3: 0.75, 4: 0.5, 5: 0.25, 6: 0.0}),
        ({"decay_ratio": 0.5}, 8, {1: 0.5, 2: 1.0, 3: 1.0, 4: 1.0, 5: 0.75, 8: 0.0}),
        ({"decay_type": "sqrt"}, 6, {3: 0.5, 6: 0.0}),
        ({"decay_type": "cosine"}, 6, {4: 0.5, 6: 0.0}),
        ({"min_lr_factor": 0.2}, 6, {4: 0.6, 6: 0.2}),
        ({"total_steps": 12}, 6, {6: 0.6, 12: 0.0}),
        ({"total_steps": 6}, 12, {6: 0.0, 12: 0.0}),
        ({"warmup_steps": 200}, 10, {1: 0.1, 10: 1.0}),
        ({"warmup_steps": 0}, 4, {1: 0.75, 4: 0.0}),
        ({"decay_ratio": 0.0}, 4, {3: 1.0, 4: 1.0, 9: 1.0}),
        ({"warmup_steps": 4, "decay_ratio": 1.0}, 8, {4: 1.0, 5: 0.75, 8: 0.0}),
    ],
)
def test_the_factor_follows_warmup_and_decay(changes, steps, expected):
    schedule = build_schedule(section(**changes), steps, {})
    assert {step: schedule.factor(step) for step in expected} == pytest.approx(expected)


def test_the_rate_depends_on_the_horizon_and_not_on_the_length_of_the_run():
    short, long = (build_schedule(section(total_steps=100), steps, {}) for steps in (10, 100))
    assert [short.factor(s) for s in range(1, 101)] == [long.factor(s) for s in range(1, 101)]
