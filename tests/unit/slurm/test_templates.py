"""Batch scripts with a fake Slurm that records calls. tests/slurm uses a real Slurm."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.slurm import job
from torchtitan_like.slurm.templates import TEMPLATES

ALL = sorted(
    path
    for path in TEMPLATES.iterdir()
    if path.suffix in (".sh", ".slurm") and path.name != "env.sh"
)
# Replaces Slurm's commands. Records the arguments and prints FAKE_OUTPUT.
FAKE = """#!/bin/sh
printf '%s' "${0##*/}" >>"$CALLS"; printf ' %s' "$@" >>"$CALLS"; echo >>"$CALLS"
eval "$FAKE_OUTPUT"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the recorded calls."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol", "squeue", "srun", "scancel"):
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin/titan").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torchtitan_like "$@"\n'
    )
    (tmp_path / "bin/titan").chmod(0o755)
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAKE_OUTPUT", "")
    monkeypatch.setenv("SCRIPTS", str(TEMPLATES))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [
        name
        for name in os.environ
        if name.startswith("SLURM_") or name in ("NNODES", "MASTER_ADDR")
    ]:
        monkeypatch.delenv(name)
    return tmp_path / "calls"


def bash(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(TEMPLATES / script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_help_of_every_script_has_no_side_effects(slurm: Path, script: Path) -> None:
    done = bash(script.name, "--help")
    assert done.returncode == 0, done.stderr
    assert (
        len(done.stdout.splitlines()) > 3
        and "SBATCH" not in done.stdout
        and "set -" not in done.stdout
    )
    assert slurm.read_text() == ""


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_scripts_have_no_site_specific_options(script: Path) -> None:
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    site = (
        "--partition",
        "--account",
        "--qos",
        "--constraint",
        "--gres",
        "--gpus",
        "--exclude",
        "--mail",
        "--mem",
    )
    assert not [line for line in options if any(word in line for word in site)]


def test_a_dry_run_prints_rendezvous_and_cores(slurm: Path, tmp_path: Path) -> None:
    done = bash(
        "train.slurm", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path / "out"),
        DRY_RUN="1", SLURM_JOB_ID="4711", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]", SLURM_CPUS_ON_NODE="96",
        FAKE_OUTPUT="echo n1; echo n2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("+ NNODES")]
    assert line.startswith(
        "+ NNODES=2 MASTER_ADDR=n1 MASTER_PORT=24711 srun --nodes=2 --ntasks=2 --ntasks-per-node=1 "
    )
    assert (
        "--cpus-per-task=96 --kill-on-bad-exit=1" in line
        and f"{TEMPLATES}/node.sh --job.config_file" in line
    )
    assert slurm.read_text() == "scontrol show hostnames n[1-2]\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("env", "code", "message"),
    [
        (
            {"NNODES": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1"},
            1,
            "Misconfigured script: NNODES=4 != SLURM_NNODES=2",
        ),
        ({"SCRIPTS": "/nowhere", "SLURM_JOB_ID": "1"}, 78, "There is no env.sh in /nowhere"),
        ({}, 78, "This is a batch script: sbatch"),
        ({"SLURM_JOB_ID": "1"}, 1, "--job.config_file must name the config"),
    ],
)
def test_invalid_environments_start_nothing(
    slurm: Path, env: dict[str, str], code: int, message: str
) -> None:
    done = bash("train.slurm", **env)
    assert done.returncode == code and message in done.stderr
    assert slurm.read_text() == ""


def test_an_invalid_config_starts_nothing(slurm: Path) -> None:
    config = ["--job.config_file", "train_configs/debug_model.toml", "--training.stesp", "3"]
    done = bash("train.slurm", *config, SLURM_JOB_ID="1")
    assert done.returncode == 78 and "training.stesp" in done.stderr
    assert slurm.read_text() == ""


def test_a_dry_run_of_check_nodes_starts_nothing(slurm: Path) -> None:
    done = bash("check_nodes.slurm", "--memory-gib", "70", DRY_RUN="1", SLURM_CPUS_PER_TASK="12")
    assert done.returncode == 0, done.stderr
    check = ["titan", "node", "check", "--ranks", "--memory-gib", "70"]
    assert (
        shlex.split(done.stdout) == ["srun", "--cpus-per-task=12", *check]
        and slurm.read_text() == ""
    )


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (65, 0), (75, 0), (130, 0), (1, 1), (78, 78)]
)
def test_a_node_trains_on_all_gpus_and_maps_exit_codes(
    slurm: Path, tmp_path: Path, code: int, expected: int
) -> None:
    """Agreed exit codes become 0, so that srun does not end the other nodes."""
    (tmp_path / "bin/titan").write_text(f'#!/bin/sh\necho "NGPU=$NGPU $@"\nexit {code}\n')
    done = bash("node.sh", "--job.config_file", "x.toml")
    assert (done.returncode, done.stdout) == (
        expected,
        "NGPU=auto train --job.config_file x.toml\n",
    )
    assert bash("node.sh", NGPU="3").stdout == "NGPU=3 train\n"


def test_each_job_of_a_chain_waits_for_the_previous_one(slurm: Path, tmp_path: Path) -> None:
    counts = f"n=$(wc -l <{tmp_path}/calls); echo $((100 + n))';cluster'"
    done = bash(
        "submit_chain.sh",
        "3",
        "--after",
        "77",
        "--nodes=2",
        "train.slurm",
        "a b",
        FAKE_OUTPUT=counts,
    )
    assert done.stdout.split() == ["101", "102", "103"], done.stderr
    before = [line.split()[3] for line in slurm.read_text().splitlines()]
    assert before == [f"--dependency=afterany:{number}" for number in (77, 101, 102)]
    slurm.write_text("")
    dry_run = bash("submit_chain.sh", "2", "train.slurm", DRY_RUN="1")
    assert dry_run.stdout.splitlines()[0] == "REQUEUE=0 sbatch --parsable --no-requeue train.slurm"
    assert slurm.read_text() == ""
    assert bash("submit_chain.sh", "x", "train.slurm").returncode == 78


def test_cron_resubmits_itself_first(slurm: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "cron.daily"
    jobs.mkdir()
    (jobs / "a.slurm").touch()
    (jobs / "b.off").touch()
    done = bash(
        "cron.slurm", "1day", str(jobs), SLURM_JOB_NAME="cron-daily", SLURM_JOB_PARTITION="cpu"
    )
    assert done.returncode == 0, done.stderr
    first, second = slurm.read_text().splitlines()
    options = "--begin=now+1day --dependency=singleton --job-name=cron-daily --partition=cpu"
    assert first == f"sbatch {options} {TEMPLATES}/cron.slurm 1day {jobs}"
    assert second == f"sbatch {jobs}/a.slurm"


def test_the_watchdog_observes_job_run_and_disk(slurm: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs"
    run.mkdir()
    done = bash(
        "watchdog.slurm", str(run), "train", NOTIFY=f"cat >>{tmp_path}/received", EVERY="2hours"
    )
    assert done.returncode == 1
    first = slurm.read_text().splitlines()[0]
    assert (
        first
        == f"sbatch --begin=now+2hours --dependency=singleton --job-name=watchdog {TEMPLATES}/watchdog.slurm {run} train"
    )
    assert (tmp_path / "received").read_text() == (
        f"job train: neither running nor queuedrun {run}: no run has started in this folder"
    ), "expected no alert for the disk"


def test_old_logs_are_deleted(slurm: Path, tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("old.out", "new.out", "old.txt"))
    for file, days in ((old, 9), (new, 2), (other, 9)):
        file.touch()
        os.utime(file, (file.stat().st_mtime - days * 86400,) * 2)
    assert bash("clean_logs.slurm", str(tmp_path), DRY_RUN="1").stdout == f"{old}\n"
    assert old.exists()
    assert bash("clean_logs.slurm", str(tmp_path)).stdout == f"{old}\n"
    assert not old.exists() and new.exists() and other.exists()


def test_old_files_of_ranks_are_deleted_on_request(tmp_path: Path) -> None:
    """16,384 ranks write 100,000 files per start."""
    run = tmp_path / "outputs"
    deleted = [run / "attempts/1/logs/rank7.log", run / "attempts/1/heartbeat/rank-7.json",
             run / "torchrun/id_x/attempt_0/7/stdout.log"]  # fmt: skip
    kept = [run / "attempts/1/environment/facts.json", run / "attempts/1/errors/rank-7.json",
               run / "checkpoint/step-5/shard-00007.bin", run / "metrics.jsonl"]  # fmt: skip
    recent = [run / "attempts/2/logs/rank7.log", run / "torchrun/id_y/attempt_0/7/stdout.log"]
    for file in (*deleted, *kept, *recent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if file not in recent:
            os.utime(file, (file.stat().st_mtime - 8 * 86400,) * 2)
    assert bash("clean_logs.slurm", str(tmp_path)).stdout == ""
    assert bash("clean_logs.slurm", str(tmp_path), RANKS="1", DRY_RUN="1").stdout.split() == sorted(
        map(str, deleted)
    )
    for folder in (tmp_path, run):  # a folder of runs, or one run
        assert bash("clean_logs.slurm", str(folder), RANKS="1").returncode == 0
        assert not any(file.exists() for file in deleted) and all(
            file.exists() for file in (*kept, *recent)
        )
    assert not (run / "torchrun/id_x").exists()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("node-[42,49-51]", "node-42 node-49 node-50 node-51"),
        ("a[08-10]x,b", "a08x a09x a10x b"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
    ],
)
def test_host_lists_are_expanded(slurm: Path, hosts: str, expected: str) -> None:
    assert bash("hosts.sh", hosts, FAKE_OUTPUT="exit 1").stdout.split() == expected.split()
    hostfile = bash(
        "hosts.sh", "--hostfile", FAKE_OUTPUT="exit 1", SLURM_JOB_NODELIST=hosts, SLOTS="4"
    ).stdout
    assert hostfile.splitlines() == [f"{host} slots=4" for host in expected.split()]


def test_py_spy_runs_in_the_job_without_gpus(slurm: Path, tmp_path: Path) -> None:
    done = bash("pyspy_srun.sh", "7", str(tmp_path / "stacks"), "--native", FAKE_OUTPUT="echo ' 4'")
    assert done.returncode == 0, done.stderr
    srun = slurm.read_text().splitlines()[1]
    assert srun.startswith(
        "srun --jobid=7 --overlap --gres=none --nodes=4 --ntasks=4 --ntasks-per-node=1 --label "
    )
    assert srun.endswith(f"templates/pyspy_all.sh {tmp_path / 'stacks'} --native")
    assert bash("pyspy_srun.sh", "7").returncode == 1, (
        "expected an error for a job that does not run"
    )


def test_py_spy_dumps_only_ranks(tmp_path: Path) -> None:
    """Each rank is a process that prints a line and waits."""
    program = ["-c", "print(flush=True); input()"]
    module = ["-m", "torchtitan_like.train"]
    bash_command = ["bash", "-c", "echo; read -r line", "python"]
    rank_command = [sys.executable, *program, "/home/bashir/a.toml", *module]
    commands = {
        "3": rank_command,
        "": [*rank_command[:3], "torchtitan_like.torchrun", *module],
        "4": [*bash_command, *module],
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path)], env={**os.environ, "RANK": rank}, text=True, **pipes
        )
        for rank, command in commands.items()
    ]
    try:
        for process in processes:
            process.stdout.readline()
        script = [str(TEMPLATES / "pyspy_all.sh"), str(tmp_path), "--native"]
        env = {**os.environ, "DRY_RUN": "1", "PATTERN": f"-m torchtitan_like.train {tmp_path}"}
        done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    finally:
        for process in processes:
            process.communicate("\n")
    [line] = done.stdout.splitlines()
    assert (
        f"py-spy dump --pid {processes[0].pid} --native >{tmp_path}/stack-" in line
        and "-rank3-" in line
    )


def test_only_nodes_without_user_processes_are_resumed(slurm: Path, tmp_path: Path) -> None:
    """n1 is free, n2 runs a user process, n3 does not respond, n4 is drained for another reason."""
    drained = ("n1", "n1", "n2", "n3")
    nodes = "; ".join(f"echo '{node}|Kill task failed'" for node in drained)
    (tmp_path / "bin/sinfo").write_text(f"#!/bin/sh\n{nodes}; echo 'n4|broken fan'\n")
    ps = "printf '0 root 1 init\\n1001 me 5 sshd\\n1001 me 6 bash\\n65534 nobody 7 x\\n'"
    (tmp_path / "bin/ps").write_text(f'#!/bin/sh\n{ps}; [ -z "$ANNA" ] || echo 1002 anna 8 bash\n')
    (tmp_path / "bin/id").write_text("#!/bin/sh\necho me\n")
    (tmp_path / "bin/ssh").write_text(
        '#!/bin/bash\nnode=${*: -2:1}\n[ "$node" != n3 ] || exit 255\n[ "$node" != n2 ] || export ANNA=1\n'
        'sh -c "${*: -1}"\n'
    )
    for name in ("sinfo", "ps", "id", "ssh"):
        (tmp_path / "bin" / name).chmod(0o755)
    done = bash("undrain_good_nodes.sh")
    assert done.returncode == 1 and done.stdout == "scontrol update NodeName=n1 State=RESUME\n"
    assert "n2 stays drained, as there are still:\n1002 anna 8 bash\n" in done.stderr
    assert "n3 does not answer" in done.stderr and slurm.read_text() == ""
    assert bash("undrain_good_nodes.sh", "--do").stdout == "n1 is resumed\n"
    assert slurm.read_text() == "scontrol update NodeName=n1 State=RESUME\n"
    assert bash("undrain_good_nodes.sh", "--yes").returncode == 78
    (tmp_path / "bin/sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert bash("undrain_good_nodes.sh").returncode == 1, (
        "expected an error without a list of drained nodes"
    )


def test_the_gpu_diagnosis_reports_the_node(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "bin/dcgmi").write_text('#!/bin/sh\n[ "$3" = 3 ]\n')
    (tmp_path / "bin/srun").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    (tmp_path / "bin/dcgmi").chmod(0o755)
    healthy, bad = bash("dcgmi.slurm"), bash("dcgmi.slurm", "4")
    host = os.uname().nodename.split(".")[0]
    assert (healthy.returncode, healthy.stdout) == (0, f"{host} is OK\n"), healthy.stderr
    assert (bad.returncode, bad.stdout) == (1, f"{host} is BAD\n")
    assert bash("dcgmi.slurm", "5").returncode == 78


# ---- decisions of a job


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("SLURM_ARRAY_JOB_ID", "REQUEUE", "MAX_STALLED_STARTS", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    return {
        "job": {"dump_folder": str(tmp_path / "outputs")},
        "checkpoint": {"enable": True, "folder": "checkpoint"},
        "training": {"steps": 10},
        "resilience": {"kill_switch_path": "KILL"},
    }


def publish(config: dict, step: int) -> None:
    folder = Path(config["job"]["dump_folder"]) / f"checkpoint/step-{step}"
    folder.mkdir(parents=True)
    write_manifest(folder, {"kind": "full", "step": step, "files": {}})


def write_exit(config: dict, code: int) -> None:
    folder = Path(config["job"]["dump_folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exit.json").write_text(json.dumps({"reason": "x", "code": code, "step": 1}))


@pytest.mark.parametrize(("step", "expected"), [(None, "0"), (4, "4"), (10, "none"), (12, "none")])
def test_a_finished_run_is_not_started(config, capsys, step: int | None, expected: str) -> None:
    write_exit(config, 0)
    if step is not None:
        publish(config, step)
    assert job.before(config) == 0
    assert capsys.readouterr().out.split() == [expected]
    assert (Path(config["job"]["dump_folder"]) / "exit.json").exists() == (expected == "none")


def test_a_finished_run_with_load_step_is_started(config, capsys) -> None:
    publish(config, 10)
    config["checkpoint"]["load_step"] = 4
    assert job.before(config) == 0
    assert capsys.readouterr().out.split() == ["10"]


def test_the_kill_switch_starts_nothing(config, capsys, tmp_path) -> None:
    config["resilience"]["kill_switch_path"] = str(tmp_path / "stop")
    (tmp_path / "stop").touch()
    job.before(config)
    assert capsys.readouterr().out.split() == ["none"]


@pytest.mark.parametrize(
    ("exit_code", "srun_code", "code", "is_requeued"),
    [
        (0, 0, 0, False),
        (75, 0, 75, True),
        (75, 143, 75, True),  # the code of exit.json counts
        (74, 0, 74, True),
        (65, 0, 65, False),
        (70, 0, 70, False),
        (130, 0, 130, False),
        (69, 0, 69, True),
        (None, 137, 1, True),
        (None, 0, 1, True),
        (None, 78, 78, False),
        (None, 2, 2, False),  # wrong arguments
        (75, 78, 78, False),  # one rank refused the config, then rank 0 was stopped
    ],
)
def test_exit_codes_that_requeue_a_job(
    config, capsys, exit_code, srun_code, code, is_requeued
) -> None:
    if exit_code is not None:
        write_exit(config, exit_code)
    assert job.after(config, 0, srun_code) == (75 if is_requeued else 0)
    assert capsys.readouterr().out == f"{code}\n"


@pytest.mark.parametrize(
    "variable", [("SLURM_ARRAY_JOB_ID", "1"), ("REQUEUE", "0"), ("MAX_STALLED_STARTS", "1")]
)
def test_variables_that_prevent_a_requeue(config, monkeypatch, variable) -> None:
    write_exit(config, 75)
    monkeypatch.setenv(*variable)
    assert job.after(config, 0, 0) == 0


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (4, 75)])
def test_a_job_without_start_count_needs_progress_to_requeue(
    config, capsys, monkeypatch, step, expected
) -> None:
    """On a full disk, the job would otherwise start and crash forever."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    if step:
        publish(config, step)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert job.after(config, 0, 1) == expected
    assert ("cannot be counted: [Errno 28] No space left on device" in capsys.readouterr().err) == (
        expected == 0
    )


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"job": "4711", "stalled_starts": "x"}', "3"])
def test_a_malformed_count_of_starts_is_zero(config, text: str) -> None:
    folder = Path(config["job"]["dump_folder"])
    folder.mkdir()
    (folder / job.STARTS).write_text(text)
    assert [job.after(config, 0, 1) for _ in range(3)] == [75, 75, 0]


@pytest.mark.parametrize(
    ("decision", "output", "code", "is_requeued"),
    [(0, "65", 65, False), (75, "75", 75, True), (78, "", 78, False), (1, "", 1, False)],
)
def test_a_job_is_queued_again_only_by_decision(
    slurm: Path, tmp_path: Path, decision: int, output: str, code: int, is_requeued: bool
) -> None:
    """If the decision fails, the job must not start forever."""
    python = tmp_path / "bin/python"
    python.write_text(
        f'#!/bin/sh\n[ "$3" != before ] || echo 0\n[ "$3" != after ] || {{ echo {output}; exit {decision}; }}\n'
    )
    python.chmod(0o755)
    (tmp_path / "bin/titan").write_text("#!/bin/sh\n")
    done = bash(
        "train.slurm",
        "--job.config_file",
        "x.toml",
        SLURM_JOB_ID="7",
        FAKE_OUTPUT="echo RUNNING",
        PYTHON=str(python),
    )
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in slurm.read_text().splitlines()) == is_requeued


def test_starts_without_progress_are_limited(config, monkeypatch) -> None:
    assert [job.after(config, 0, 1) for _ in range(3)] == [75, 75, 0]
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert [job.after(config, 0, 1) for _ in range(2)] == [75, 75], (
        "expected a new count after a new submission"
    )
    publish(config, 4)
    assert [job.after(config, first, 1) for first in (0, 4, 4, 4)] == [75, 75, 75, 0]
