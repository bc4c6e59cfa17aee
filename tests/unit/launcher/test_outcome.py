"""Exit codes from the error records of a crashed run."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from torchtitan_like.checkpoint.step_folders import StepFolder
from torchtitan_like.config import load_config
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.launcher import outcome
from torchtitan_like.launcher.outcome import Start, report_crash, report_end
from torchtitan_like.monitor.attempt import record_error
from torchtitan_like.util.run_directory import RunEnd, read_exit, write_exit


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
    config = load_config(["--job.dump_folder", str(tmp_path)])
    assert report_crash(config, 1, Start(0.0, 1, "titan train", ["titan"])) == 65
    assert json.loads((tmp_path / "exit.json").read_text()) == {
        "reason": "bad_data",
        "code": 65,
        "step": 7,
    }
    assert "rank 1, step 7, phase data:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "written", "expected"),
    [
        (0, RunEnd("requeue", 75, 3), 75),
        (143, RunEnd("requeue", 75, 3), 75),  # torchrun alone got SIGTERM
        (130, RunEnd("interrupted", 130, 3), 130),
        (137, RunEnd("requeue", 75, 3), 75),  # torchrun was killed after the ranks had agreed
        (0, RunEnd("storage", 74, 3), 74),
        (137, None, 69),  # a rank was killed, or all of them
        (1, None, 1),
        (1, RunEnd("requeue", 75, None), 1),  # a rank was stopped because another one crashed
    ],
)
def test_the_code_follows_exit_json_after_a_signal_to_any_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    returned: int,
    written: RunEnd | None,
    expected: int,
) -> None:
    """It does so on a disk that fails, too."""

    def fail(folder: Path) -> list[StepFolder]:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(outcome, "published_steps", fail)
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    if written is not None:
        write_exit(tmp_path, written)
    config = load_config(["--job.dump_folder", str(tmp_path), "--checkpoint.enable"])
    start = Start(0.0, 1, "titan train", ["titan"])
    assert report_end(config, returned, None, start) == expected
    if expected not in (0, 1):
        assert read_exit(tmp_path).code == expected
