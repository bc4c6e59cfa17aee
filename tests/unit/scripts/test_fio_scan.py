"""scripts/fio_scan.sh: its commands and its table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.harness.runner import ROOT


def write_program(folder: Path, name: str, text: str) -> None:
    """Write a command into the PATH that `run` sets."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def run(
    folder: Path, script: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **variables}
    command = ["bash", str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


FIO = """#!/bin/sh
echo "$@" >>"$CALLS"
echo "note: iodepth is capped"
case "$*" in *=write*1g*) exit 1 ;; esac
cat "$ANSWER"
"""


def test_results_are_printed_as_a_table(tmp_path: Path) -> None:
    write_program(tmp_path, "fio", FIO)
    job = {
        "read": {"bw_bytes": 2_400_400_000, "iops": 2400.4},
        "write": {"bw_bytes": 1_000_000, "iops": 61.0},
    }
    (tmp_path / "answer").write_text(json.dumps({"jobs": [job]}))
    variables = {"CALLS": str(tmp_path / "calls"), "ANSWER": str(tmp_path / "answer")}
    done = run(tmp_path, "fio_scan.sh", str(tmp_path), SIZES="16k 1m", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["| --- | --- | --- | --- | --- |"] + [
        f"| {size} | 2400 | 2400 | 1 | 61 |" for size in ("16k", "1m")
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4 and all("--direct=1" in call and "--unlink=1" in call for call in calls)
    assert f"--directory={tmp_path} --rw=write --filesize=1m --bs=1m --numjobs=16" in calls[3]
    failed = run(tmp_path, "fio_scan.sh", str(tmp_path), **variables)
    assert (
        failed.returncode == 1
        and failed.stdout.splitlines()[-1] == "| 1g | 2400 | 2400 | failed |  |"
    )
    assert failed.stderr == "", "expected only messages of fio"


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    write_program(tmp_path, "fio", FIO)
    done = run(tmp_path, "fio_scan.sh", str(tmp_path), DRY_RUN="1", CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0 and done.stdout.count("fio --name=scan-") == 6 and done.stderr == ""
    assert not (tmp_path / "calls").exists()
    assert run(tmp_path, "fio_scan.sh", str(tmp_path / "nowhere")).returncode == 78
