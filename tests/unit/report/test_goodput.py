"""The classes of a run's wall time, compared with calculations by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.run_folder import (
    event,
    start_event,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from torchtitan_like.report.goodput import (
    CLASSES,
    AttemptTimes,
    Goodput,
    Window,
    measure_goodput,
)
from torchtitan_like.report.history import build_history
from torchtitan_like.report.recorded import read_run


def times(start: float, end: float, *steps: float, **fields: object) -> AttemptTimes:
    """An attempt whose steps 1, 2, ... end at the given times."""
    numbers = np.arange(1, len(steps) + 1)
    classes = ["training"] * len(steps)
    return AttemptTimes(start, end, numbers, np.array(steps, float), classes, **fields)  # type: ignore[arg-type]


def nonzero(goodput: Goodput) -> dict[str, float]:
    return {name: seconds for name, seconds in goodput.seconds.items() if seconds}


def of_folder(run: Path) -> Goodput:
    return build_history(read_run(run)).goodput


def test_a_run_that_was_killed_twice(tmp_path: Path) -> None:
    goodput = of_folder(write_killed_run(tmp_path))
    assert goodput.wall == 220 - 100
    expected = {
        "start_up": 10 + 6 + 6,  # 100 to 110, 130 to 136, 180 to 186
        "training": 2 + 2 + 2 + 2 + 2,  # steps 2 and 3 of attempt 1; 6, 7, 8 of attempt 3
        "checkpoint": 1,  # step 4 of attempt 1 ends 3 s after step 3
        "validation": 5,
        "stall": 30 + 20,  # from the last heartbeat of attempt 2 to its error; step 8
        "skipped": 2,  # step 5 of attempt 3
        "repeated": 2 + 2 + 1.5 + 2 + 2,  # steps 4, 5 and a lost part of 6; steps 5, 6
        "shutdown": 1,  # 219 to 220
        "stopped": 9.5 + 10,  # 120.5 to 130, 170 to 180
    }
    assert goodput.seconds == pytest.approx(expected)
    assert goodput.share == pytest.approx(10 / 120)
    assert sum(goodput.attempts[2].values()) == pytest.approx(220 - 170)


def test_a_steady_run(tmp_path: Path) -> None:
    goodput = of_folder(write_steady_run(tmp_path))
    expected = {"start_up": 12.0, "training": 38.0, "shutdown": 1.0}
    assert nonzero(goodput) == pytest.approx(expected)


def test_an_asynchronous_checkpoint_costs_only_the_delay_of_its_steps() -> None:
    steps = (10.0, 12.0, 14.0, 16.5, 18.5, 20.5)  # step 4 is 0.5 s late
    goodput = measure_goodput(
        [times(0.0, 20.5, *steps, saves=[Window(14.0, 20.5)], has_stopped=True)]
    )
    assert nonzero(goodput) == pytest.approx(
        {"start_up": 10.0, "training": 10.0, "checkpoint": 0.5}
    )


def test_lost_rows_do_not_make_a_stall() -> None:
    attempt = times(0.0, 50.0, 10.0, 12.0, 14.0, 50.0, has_stopped=True)
    attempt.steps[3] = 21  # the rows of steps 4 to 20 are lost
    assert nonzero(measure_goodput([attempt])) == pytest.approx(
        {"start_up": 10.0, "training": 40.0}
    )


def test_a_last_checkpoint_and_validation() -> None:
    attempt = times(
        0.0,
        30.0,
        10.0,
        12.0,
        14.0,
        saves=[Window(14.0, 20.0)],
        validations=[Window(20.0, 28.0)],
        has_stopped=True,
    )
    assert nonzero(measure_goodput([attempt])) == pytest.approx(
        {"start_up": 10.0, "training": 4.0, "checkpoint": 6.0, "validation": 8.0, "shutdown": 2.0}
    )


def test_an_attempt_without_a_step_is_start_up() -> None:
    goodput = measure_goodput([times(0.0, 7.0), times(10.0, 20.0, 15.0, 20.0, has_stopped=True)])
    assert nonzero(goodput) == pytest.approx({"start_up": 12.0, "stopped": 3.0, "training": 5.0})


@pytest.mark.parametrize(("start", "num_jumps"), [(4.0, 1), (15.0, 0)])
def test_a_clock_that_is_set_back_is_counted_and_loses_no_second(
    start: float, num_jumps: int
) -> None:
    """A second start that seems a second early is the rounding of the kernel's boot time."""
    first = times(0.0, 16.0, 10.0, 12.0, 14.0, 16.0, has_stopped=True)
    second = times(start, 22.0, 15.0, 18.0, 20.0, 22.0, has_stopped=True)
    goodput = measure_goodput([first, second])
    assert goodput.num_clock_jumps == num_jumps
    assert goodput.wall == pytest.approx(22.0)


def test_the_newest_rows_of_a_live_run_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next rows are not written yet. Once it has stopped, the time after the last row is lost."""
    run = write_steady_run(tmp_path)
    write_rows(run / "events.jsonl", [start_event(1, 1000.0)])
    write_rows(run / "attempts/1/heartbeat/rank-0.json", [{"time": 1090.0, "host": "a"}])
    monkeypatch.setattr("torchtitan_like.report.recorded.time.time", lambda: 1095.0)
    live = {"start_up": 12.0, "training": 38.0}
    assert nonzero(of_folder(run)) == pytest.approx(live)
    monkeypatch.setattr("torchtitan_like.report.recorded.time.time", lambda: 9000.0)
    assert nonzero(of_folder(run)) == pytest.approx(live | {"repeated": 40.0})


def test_without_attempts_and_events_the_run_starts_at_its_first_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(n, 100.0 + n) for n in range(1, 6)])
    assert nonzero(of_folder(tmp_path)) == pytest.approx({"training": 4.0})
    write_rows(tmp_path / "events.jsonl", [event("save", 103.0, step=2, seconds=0.5)])
    assert nonzero(of_folder(tmp_path)) == pytest.approx({"training": 4.0})


MOMENTS = st.floats(0, 1e6)


@st.composite
def random_attempt(draw: st.DrawFn) -> AttemptTimes:
    moments = draw(st.lists(MOMENTS, max_size=8))
    windows = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda pair: Window(*sorted(pair))))
    names = st.sampled_from(["training", "skipped", "repeated"])
    return AttemptTimes(
        start=draw(MOMENTS),
        end=draw(MOMENTS),
        steps=np.cumsum(draw(st.lists(st.integers(1, 5), min_size=8, max_size=8)))[: len(moments)],
        times=np.array(moments, dtype=np.float64),
        classes=[draw(names) for _ in moments],
        saves=draw(windows),
        validations=draw(windows),
        last_sign=draw(MOMENTS),
        has_stopped=draw(st.booleans()),
    )


@given(st.lists(random_attempt(), min_size=1, max_size=4))
def test_each_second_has_one_class_whatever_the_clocks_show(attempts: list[AttemptTimes]) -> None:
    goodput = measure_goodput(attempts)
    latest = max(max([a.start, a.end, *a.times.tolist()]) for a in attempts)
    assert goodput.wall == pytest.approx(latest - attempts[0].start, abs=1e-3)
    assert min(goodput.seconds.values()) >= -1e-6
    assert goodput.seconds.keys() == CLASSES.keys()


def test_discarded_rows_belong_to_an_earlier_attempt_whatever_the_clocks_show(
    tmp_path: Path,
) -> None:
    """The clock of attempt 2 is behind: it starts "before" the steps that it discards."""
    write_rows(tmp_path / "metrics.jsonl", [step_row(1, 110.0), step_row(2, 121.0)])
    write_rows(tmp_path / "metrics.discarded-2.jsonl", [step_row(n, 114.0 + n) for n in (2, 3)])
    write_rows(tmp_path / "events.jsonl", [start_event(1, 100.0), start_event(2, 115.0)])
    first, second = build_history(read_run(tmp_path)).attempts
    assert (first.first_step, first.last_step) == (1, 3)
    assert (second.first_step, second.last_step) == (2, 2)
