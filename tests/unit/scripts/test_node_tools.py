"""node_info.sh, fio_scan.sh and import_bench.py: what they ask of the machine, and what they say of its answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts import import_bench
from tests.harness.runner import ROOT


def program(folder: Path, name: str, text: str) -> None:
    """A command for the PATH that `run` sets."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def run(folder: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **variables}
    command = ["bash", str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def device(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_who_is_on_which_numa_node(tmp_path: Path) -> None:
    program(
        tmp_path,
        "nvidia-smi",
        '#!/bin/sh\n[ "$1" = topo ] && echo "GPU0 NV18" || echo "0, 00000000:3B:00.0, NVIDIA H100"\n',
    )
    device(tmp_path / "sys/bus/pci/devices/0000:3b:00.0", numa_node="1", local_cpulist="48-95")
    device(tmp_path / "sys/class/infiniband/mlx5_0/device", numa_node="0")
    device(tmp_path / "sys/class/infiniband/mlx5_0/ports/1", rate="400 Gb/sec (4X NDR)", state="4: ACTIVE")
    device(tmp_path / "sys/class/net/eth0/device", numa_node="1")
    (tmp_path / "sys/class/net/eth0/speed").write_text("25000\n")
    device(tmp_path / "sys/class/net/lo")
    program(tmp_path, "nproc", "#!/bin/sh\necho ${OMP_NUM_THREADS:-6}\n")
    done = run(tmp_path, "node_info.sh", SYS=str(tmp_path / "sys"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "cores for this process: 6" in lines
    assert lines[-4:] == [
        "GPU 0: NUMA node 1, cores 48-95, NVIDIA H100",
        "InfiniBand mlx5_0: NUMA node 0, 400 Gb/sec (4X NDR), 4: ACTIVE",
        "network eth0: NUMA node 1, 25000 Mbit/s",
        "GPU0 NV18",
    ]


def test_a_machine_without_gpus_is_told_too(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    done = run(tmp_path, "node_info.sh", SYS=str(tmp_path / "sys"))
    assert done.returncode == 0 and done.stdout.startswith("host: ") and "GPU" not in done.stdout


# ---- fio

FIO = """#!/bin/sh
echo "$@" >>"$CALLS"
echo "note: iodepth is capped"
case "$*" in *=write*1g*) exit 1 ;; esac
cat "$ANSWER"
"""


def test_a_disk_is_told_as_a_table(tmp_path: Path) -> None:
    program(tmp_path, "fio", FIO)
    told = {"read": {"bw_bytes": 2_400_400_000, "iops": 2400.4}, "write": {"bw_bytes": 1_000_000, "iops": 61.0}}
    (tmp_path / "answer").write_text(json.dumps({"jobs": [told]}))
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
    assert failed.returncode == 1 and failed.stdout.splitlines()[-1] == "| 1g | 2400 | 2400 | failed |  |"
    assert failed.stderr == "", "what fio says of it, and nothing of ours"


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    program(tmp_path, "fio", FIO)
    done = run(tmp_path, "fio_scan.sh", str(tmp_path), DRY_RUN="1", CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0 and done.stdout.count("fio --name=scan-") == 6 and done.stderr == ""
    assert not (tmp_path / "calls").exists()
    assert run(tmp_path, "fio_scan.sh", str(tmp_path / "nowhere")).returncode == 78


# ---- imports


def test_an_import_is_timed_cold_and_warm(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_bench.main(["json"]) == 0
    assert re.match(r"json: \d+\.\d", capsys.readouterr().out)
    assert import_bench.main(["no_such_module"]) == 2
    assert "no_such_module cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


def test_the_files_of_an_import_are_known_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text("import time, json\ntime.sleep(0.2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seconds, files = import_bench.timed_import("slow_module")
    assert 0.2 < seconds < 60
    names = {file.name for file in files}
    assert any(name.startswith("slow_module.") for name in names) and any("decoder" in name for name in names)
    forgotten: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: forgotten.append(words[3]))
    assert import_bench.drop([tmp_path / "slow_module.py"]) == (tmp_path / "slow_module.py").stat().st_size
    assert forgotten == [os.POSIX_FADV_DONTNEED]
