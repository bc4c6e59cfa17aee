"""A start says what it will do, how long each part took, and that a long part goes on."""

from __future__ import annotations

import logging
import time

import pytest

from torchtitan_like.monitor import start_clock
from torchtitan_like.monitor.start_clock import StartClock


def test_each_part_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(start_clock, "INTERVAL", 0.01)
    now = 100.0
    with StartClock(clock=lambda: now) as clock:
        clock.plan("read the data", "run step 1")
        now += 1.25
        clock.begin_next()
        now += 12
        deadline = time.monotonic() + 10
        while "so far" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        clock.begin_next()
        num_lines = len(caplog.records)
    lines = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert list(lines) == [
        "Until the first step is done: read the data, run step 1",
        "Done in 1.2 s: read the data",
        "12 s so far: run step 1",
        "Done in 12.0 s: run step 1",
    ]
    time.sleep(0.05)
    assert len(caplog.records) == num_lines


def test_other_ranks_and_a_start_that_fails_report_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(start_clock, "INTERVAL", 0.01)
    with StartClock(is_leader=False) as clock:
        clock.plan("read the data")
        clock.begin_next()
    with pytest.raises(ValueError), StartClock() as clock:
        clock.plan("read the data")
        raise ValueError
    caplog.clear()
    time.sleep(0.05)
    assert caplog.records == []
