"""`scripts/ckpt_interval.py`: the best interval, and the times of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import ckpt_interval


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run the script. Returns its code and output."""
    code = ckpt_interval.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_time_between_failures_must_be_above_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--save-seconds", 40, "--step-seconds", 2.5, "--mtbf-hours", 0)
    message = "argument --mtbf-hours: it is '0'. Expected a number above 0: correct it\n"
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("seconds", [("1e308", "1e-308"), ("1e308", "1e300"), ("1e9", "1e-9")])
def test_an_interval_of_absurd_times_is_refused(
    seconds: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--save-seconds", seconds[0], "--step-seconds", seconds[1], "--mtbf-hours", "1e300"]
    code, text = run(capsys, *argv)
    assert code == 2 and "steps. Expected at most 1e+12. Correct the times." in text


def test_the_best_interval_follows_youngs_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """sqrt(2 * 40 s * 43,200 s) = 1,859 s = 744 steps. Saving then takes 2.1 % of the time."""
    argv = [
        "--save-seconds",
        40,
        "--step-seconds",
        2.5,
        "--mtbf-hours",
        12,
        "--interval",
        500,
    ]
    lines = run(capsys, *argv)[1].splitlines()
    assert lines[3].split() == ["500", "21", "min", "3.10%", "11", "min", "4.59%", "<-", "given"]
    assert lines[4].split() == "744 31 min 2.11% 16 min 4.30% <- best (Young, Daly)".split()
    totals = [float(line.split("%")[1].split()[-1]) for line in lines[1:]]
    assert min(totals) == 4.30


def test_interval_reads_the_times_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full checkpoints took 30 and 50 s, steps 2.5 s. Gaps and other formats do not count."""
    rows = [
        {"step": n, "time": 2.5 * n + (900 if n > 300 else 0)} for n in range(1, 401) if n != 200
    ]
    saves = [
        {"event": "save", "form": form, "seconds": s}
        for form, s in (("full", 30), ("hf", 999), ("full", 50))
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 401, "ti'
    )
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*saves, {"event": "stop"}, {"event": "save"}])
    )
    (tmp_path / "config.toml").write_text("[training]\nsteps = 1000\n")
    lines = run(capsys, "--run", tmp_path, "--mtbf-hours", 12)[1].splitlines()
    times = "40 s per checkpoint, 2.5 s per step"
    assert lines[0] == f"{times}, from 2 checkpoints and 397 steps of {tmp_path}"
    assert lines[4].split()[0] == "744"
    nowhere = tmp_path / "nowhere"
    code, text = run(capsys, "--run", nowhere, "--mtbf-hours", 12)
    assert code == 2 and text.startswith(f"{nowhere} is not the folder of a run: it has none of")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1}\n')
    code, text = run(capsys, "--run", tmp_path, "--mtbf-hours", 12)
    assert code == 2 and text.startswith(f"{tmp_path} has 2 full checkpoints and 1 steps.")
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--mtbf-hours", 12)
    message = capsys.readouterr().err
    assert message.endswith("expected --save-seconds and --step-seconds, or --run\n")
