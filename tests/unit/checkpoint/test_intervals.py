"""Time-based checkpoint intervals, and the reported cost of checkpoints."""

from __future__ import annotations

from torchtitan_like.checkpoint.checkpointer import Intervals


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_interval_starts_at_the_run_start_and_at_each_checkpoint() -> None:
    clock = Clock()
    intervals = Intervals(2.5, clock)
    clock.now += 149.9
    assert not intervals.are_over()
    clock.now += 0.1
    assert intervals.are_over()
    intervals.record_checkpoint()
    assert not intervals.are_over()
    clock.now += 150
    assert intervals.are_over()


def test_each_interval_requests_one_checkpoint() -> None:
    clock = Clock()
    intervals = Intervals(2.5, clock)
    clock.now += 150
    assert [intervals.are_over() for _ in range(3)] == [True, False, False]
    clock.now += 150
    assert intervals.are_over(), "the next interval did not request a checkpoint"


def test_an_interval_of_0_minutes_never_ends() -> None:
    clock = Clock()
    intervals = Intervals(0, clock)
    clock.now += 10**9
    assert not intervals.are_over()


def test_cost_reports_the_number_and_the_time_of_checkpoints() -> None:
    clock = Clock()
    intervals = Intervals(0, clock)
    assert intervals.cost() == "0 checkpoints took 0.0 seconds, 0.00% of the run"
    clock.now += 200
    intervals.record_checkpoint()
    intervals.record_blocked(1.5)
    intervals.record_blocked(0.5)
    assert intervals.cost() == "1 checkpoint took 2.0 seconds, 1.00% of the run"
    intervals.record_checkpoint()
    intervals.record_blocked(2)
    assert intervals.cost() == "2 checkpoints took 4.0 seconds, 2.00% of the run"
