"""Exit codes from the error records of a crashed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchtitan_like.data.errors import DataError
from torchtitan_like.launcher.outcome import report_crash
from torchtitan_like.monitor.errors import record_error


def test_damaged_data_on_one_rank_returns_the_code_of_bad_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = tmp_path / "attempts" / "1"
    for rank, phase, error in (
        (1, "data", DataError("tokens.bin is damaged")),
        (0, "step", RuntimeError("lost")),
    ):
        try:
            raise error
        except Exception as raised:
            record_error(attempt, rank, phase, 7, raised)
    assert report_crash(tmp_path, 1, 0.0) == 65
    assert json.loads((tmp_path / "exit.json").read_text()) == {
        "reason": "bad_data",
        "code": 65,
        "step": 7,
    }
    assert "rank 1, step 7, phase data:" in capsys.readouterr().err
