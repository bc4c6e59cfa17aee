"""The GPU benchmark runs the parts that were asked for, with settings that exist."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import cpu_gpu, gpu_jobs
from tests.harness.runner import ROOT
from torchtitan_like.config import load_config

# Stands in for an interpreter whose torch sees NUM_GPUS, and for nvidia-smi.
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$COMMANDS"
case "$*" in
  *device_count*) echo $NUM_GPUS ;;
  *"pip install"*) mkdir "${@: -2:1}" ;;
  *pytest*) exit 3 ;;
esac
"""


def run_script(folder: Path, *arguments: str, num_gpus: int = 1) -> tuple[int, list[str], str]:
    """Run the script with stubs; return its code, the commands it has run, and its output."""
    for name in ("python3", "nvidia-smi"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "COMMANDS": str(folder / "commands"),
        "NUM_GPUS": str(num_gpus),
    }
    script = subprocess.run(
        [ROOT / "benchmarks/gpu.sh", *arguments, folder / "report"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    commands = folder / "commands"
    lines = commands.read_text().splitlines() if commands.exists() else []
    return script.returncode, lines, script.stdout + script.stderr


@pytest.mark.parametrize(("num_gpus", "num_trainings"), [(1, 0), (2, 3)])
def test_all_parts_run_and_failures_are_counted(
    tmp_path: Path, num_gpus: int, num_trainings: int
) -> None:
    code, commands, output = run_script(tmp_path, num_gpus=num_gpus)
    assert code == 1, output
    report = (tmp_path / "report").read_text()
    assert "exit code 3" in report and "# 1 parts failed" in report and report in output
    trainings = [line for line in commands if " torchtitan_like.train " in line]
    assert len(trainings) == num_trainings
    for line in trainings:
        load_config(line.split(" torchtitan_like.train ")[1].split())
    for program in ("benchmarks.cpu_gpu", "benchmarks.gpu_jobs plan", "benchmarks.gpu_jobs run"):
        assert sum(program in line for line in commands) == 1, program
    assert not any("gradient_spikes" in line or "hf_export" in line for line in commands)


@pytest.mark.parametrize("name", gpu_jobs.JOBS)
def test_jobs_have_settings_that_exist(name: str) -> None:
    config = load_config(gpu_jobs.arguments_of(name))
    assert config.checkpoint.enable == (name == gpu_jobs.SAVED)


def test_parts_are_selected_and_wheels_are_installed(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/xxhash.whl").touch()
    options = ("--only", "compare,spikes,storage", "--wheels", str(tmp_path / "wheels"))
    code, commands, output = run_script(tmp_path, *options)
    assert code == 0, output
    assert [line for line in commands if "xxhash.whl" in line and "--no-index" in line]
    assert not any("-m pytest" in line or "gpu_jobs" in line for line in commands)
    assert sum("gradient_spikes.py runs" in line for line in commands) == 2
    assert sum("hf_export.py" in line for line in commands) == 1
    code, _, output = run_script(tmp_path, "--only", "tests,speed")
    assert code == 2 and "--only speed: no such part" in output


def test_thirty_runs_are_compared() -> None:
    assert len(cpu_gpu.CASES) == 30
    for case in cpu_gpu.CASES.values():
        assert case.equals in ("", *cpu_gpu.CASES)
        arguments = [*cpu_gpu.COMMON, *case.arguments.split()]
        load_config([f"--job.config_file={ROOT}/train_configs/{case.config}.toml", *arguments])


def test_runs_that_differ_or_fail_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"llama3": [(4.0, 1.0)], "ac-full": [(4.0, 1.01)], "lion": []}

    def run(folder: Path, *_: object) -> list[tuple[float, float]]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log").write_text("RuntimeError: no kernel\n")
        is_gpu = folder.parent.name == "gpu"
        return rows[folder.name] if is_gpu else [(4.0, 1.0)]

    monkeypatch.setattr(cpu_gpu, "run", run)
    assert cpu_gpu.compare([*rows], tmp_path, 1, 1) == 2
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["equal", "llama3", "0.0e+00 (limit 0.001)"],
        ["WRONG", "ac-full", "1.0e-02 (limit 0.001)"],
        ["WRONG", "lion", "RuntimeError: no kernel"],
    ]
