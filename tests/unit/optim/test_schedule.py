"""The learning rate is a function of the step and the horizon, not of the length of the run."""

import json
from types import SimpleNamespace

import pytest

from torchtitan_like.optim.schedule import SavedSchedule, build_schedule


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
        ({}, 6, {1: 0.5, 2: 1.0, 3: 1.0, 4: 0.75, 5: 0.5, 6: 0.25, 7: 0.0, 9: 0.0}),
        ({"decay_ratio": 0.5}, 8, {1: 0.5, 2: 1.0, 4: 1.0, 5: 1.0, 6: 0.75, 8: 0.25, 9: 0.0}),
        ({"decay_type": "sqrt"}, 6, {4: 0.5, 7: 0.0}),
        ({"decay_type": "cosine"}, 6, {5: 0.5, 7: 0.0}),
        ({"min_lr_factor": 0.2}, 6, {5: 0.6, 7: 0.2}),
        ({"total_steps": 12}, 6, {6: 0.7, 12: 0.1}),
        ({"total_steps": 6}, 12, {6: 0.25, 7: 0.0, 12: 0.0}),
        ({"warmup_steps": 200}, 10, {1: 0.1, 10: 1.0}),
        ({"warmup_steps": 0}, 4, {1: 1.0, 2: 0.75, 4: 0.25}),
        ({"decay_ratio": 0.0}, 4, {3: 1.0, 4: 1.0, 9: 1.0}),
        ({"warmup_steps": 4, "decay_ratio": 1.0}, 8, {4: 1.0, 5: 1.0, 6: 0.75, 8: 0.25}),
    ],
)
def test_the_factor_follows_warmup_and_decay(changes, steps, expected):
    schedule = build_schedule(section(**changes), steps, {})
    assert {step: schedule.factor(step) for step in expected} == pytest.approx(expected)


def test_the_rate_depends_on_the_horizon_and_not_on_the_length_of_the_run():
    short, long = (build_schedule(section(total_steps=100), steps, {}) for steps in (10, 100))
    assert [short.factor(s) for s in range(1, 101)] == [long.factor(s) for s in range(1, 101)]


def test_an_old_checkpoint_reached_the_minimum_at_the_horizon(caplog):
    schedule = build_schedule(section(), 6, {})
    saved = SavedSchedule(schedule, lambda: 5, peak_lr=1.0)
    settings = json.loads(saved.state_dict()["json"])
    del settings["end_of_decay"]
    saved.load_state_dict({"json": json.dumps(settings)})
    assert "Learning rate at step 5: 2.500e-01 before (horizon 6 steps), 5.000e-01" in caplog.text
