"""The comparison of exact runs detects a change of the last bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.exact_runs import compare, read_exact_rows


def recorded(folder: Path, loss: float) -> Path:
    """Write the recorded numbers of one run with one step."""
    row = {"step": 1, "loss": loss, "skipped": 0, "time": 3.0, "sources": {"a": {"loss": loss}}}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    steps = read_exact_rows(folder / "metrics.jsonl", ("step", "loss", "skipped", "sources"))
    path = folder / f"{loss.hex()}.json"
    path.write_text(json.dumps({"one rank": {"steps": steps, "validation": [], "checkpoints": {}}}))
    return path


def test_compare_detects_a_change_of_the_last_bit(tmp_path: Path) -> None:
    loss = 6.5
    before, after = recorded(tmp_path, loss), recorded(tmp_path, math.nextafter(loss, 7))
    assert compare(before, before) == []
    assert compare(before, after) == ["one rank"]


def test_compare_detects_a_missing_run(tmp_path: Path) -> None:
    before = recorded(tmp_path, 6.5)
    (tmp_path / "empty.json").write_text("{}")
    assert compare(before, tmp_path / "empty.json") == ["one rank"]
