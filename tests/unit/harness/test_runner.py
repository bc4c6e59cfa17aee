"""The integration runner: results, unexpected return codes, and hung runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.harness import runner
from tests.harness.runner import OverrideDefinitions, run_row
from torchtitan_like.util.jsonl import read_rows

# Replaces the trainer. Each run adds one row of metrics. "--return N" sets the return code,
# "--hang" starts a child and hangs.
FAKE_TRAINER = """
import json, subprocess, sys, time
from pathlib import Path
arguments = sys.argv[1:]
folder = Path(arguments[arguments.index("--job.dump_folder") + 1])
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"arguments": arguments}) + "\\n")
code = int(arguments[arguments.index("--return") + 1]) if "--return" in arguments else 0
(folder / "exit.json").write_text(json.dumps({"reason": "test", "code": code, "step": 1}))
print("the trainer's output")
print("and its errors", file=sys.stderr, flush=True)
if "--hang" in arguments:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(100)
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def _fake_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner,
        "trainer_command",
        lambda arguments, ngpu, folder, module: [sys.executable, "-c", FAKE_TRAINER, *arguments],
    )


def test_runs_share_a_folder_and_results_are_in_order(tmp_path) -> None:
    received = []
    row = OverrideDefinitions(
        [["--a", "1"], ["--b", "2"]], "two runs", "two_runs", expect=received.extend
    )
    results = run_row(row, tmp_path)
    assert received == results
    assert [len(result.metrics) for result in results] == [1, 2]
    assert results[1].metrics[1]["arguments"][-2:] == ["--b", "2"]
    assert results[0].exit == {"reason": "test", "code": 0, "step": 1}
    assert "the trainer's output" in results[0].stdout and "and its errors" in results[0].stdout


def test_an_unexpected_return_code_fails_the_row(tmp_path) -> None:
    overrides = [["--return", "3"], []]
    run_row(
        OverrideDefinitions(overrides, "fails first", "expected", returncodes=(3, 0)),
        tmp_path / "expected",
    )
    with pytest.raises(
        AssertionError, match=r"(?s)run 1 of 2 returned 3, expected 0.*and its errors"
    ):
        run_row(
            OverrideDefinitions(overrides, "fails first", "unexpected"), tmp_path / "unexpected"
        )
    assert len(read_rows(tmp_path / "unexpected" / "outputs" / "metrics.jsonl")) == 1


def test_a_failed_check_fails_the_row(tmp_path) -> None:
    def expect(results: list[runner.RunResult]) -> None:
        assert results[0].metrics == []

    with pytest.raises(AssertionError):
        run_row(OverrideDefinitions([[]], "wrong", "wrong", expect=expect), tmp_path)


def test_all_processes_of_a_hung_run_are_killed(tmp_path) -> None:
    started = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"did not end within 6 s.*\n.*the trainer's output"
    ) as raised:
        run_row(OverrideDefinitions([["--hang"]], "hangs", "hangs", timeout=6), tmp_path)
    assert time.monotonic() - started < 90
    child = int(str(raised.value).split("child ")[1].split()[0])
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - started < 90  # the kernel may need some time
        time.sleep(0.05)


def test_variables_of_a_shell_or_scheduler_are_removed() -> None:
    variables = {
        "SLURM_JOB_ID": "1",
        "WORLD_SIZE": "8",
        "PET_NNODES": "2",
        "http_proxy": "x",
        "CONFIG_FILE": "x",
        "LC_ALL": "xx",
    }
    code = (
        "import os, tests.conftest; "
        f"print([name for name in {list(variables)} if name in os.environ])"
    )
    env = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=runner.ROOT, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_number_of_return_codes_must_match_the_runs(tmp_path) -> None:
    with pytest.raises(ValueError, match="2 return codes for 1 runs"):
        run_row(OverrideDefinitions([[]], "wrong", "wrong", returncodes=(0, 0)), tmp_path)
