"""A resume compares metrics.jsonl with the size and last row that its checkpoint stores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.monitor.conftest import Clock
from tests.unit.monitor.test_metrics import run
from torchtitan_like.monitor.metrics import Metrics


def test_resume_warns_about_a_changed_metrics_file(
    build: Callable[..., Metrics], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    first = build(log_freq=1)
    run(first, clock, range(1, 5))
    saved = {"metrics_bytes": first.byte_offset(4), "digest_chain": 4}
    run(first, clock, range(5, 7))
    assert first.byte_offset(4) == 0, "the file has rows after step 4"
    first.close()
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    damaged = content.replace(b'"step": 2', b'"step" 2')
    changed = content.replace(
        b'"data_digest_chain": "0000000000000004"', b'"data_digest_chain": "0000000000000005"'
    )
    cases = {
        "unchanged": (content, saved, ""),
        "an older checkpoint without size and last row": (b"", {}, ""),
        "of a run of two steps": (b"".join(lines[:2]), saved, "the last row of step 2"),
        "deleted": (None, saved, "has 0 bytes"),
        "damaged": (damaged, saved, f"has {saved['metrics_bytes'] - len(lines[1])} bytes"),
        "of other samples": (changed, saved, "0000000000000005"),
    }
    for name, (current, summary, message) in cases.items():
        caplog.clear()
        path.unlink(missing_ok=True)
        if current is not None:
            path.write_bytes(current)
        build(log_freq=1, attempt=2).rewind(4, summary)
        warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
        assert [message in text for text in warnings] == [True] * bool(message), (name, warnings)
