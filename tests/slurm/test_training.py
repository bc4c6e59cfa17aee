"""Run the scripts of `titan slurm init` on a real Slurm cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.trainer import ForkServer, Starter, arguments, exact_rows
from tests.harness.runner import ROOT
from tests.slurm import cluster as slurm
from tests.slurm.cluster import Cluster
from torchtitan_like.slurm import templates

STEPS, HOLD_AT = 20, 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster, or skip the tests if Slurm is not installed.

    With REQUIRE_SLURM (continuous integration), a missing Slurm is a failure if it can be
    installed.
    """
    missing = slurm.missing_programs_message()
    if missing:
        if os.environ.get("REQUIRE_SLURM") and slurm.can_install():
            pytest.fail(missing)
        pytest.skip(f"no Slurm: {missing}")
    if os.geteuid() != 0:
        pytest.skip("no Slurm: these tests start its daemons as root")
    started = slurm.start(tmp_path_factory.mktemp("slurm"))
    write_scripts(started.scripts, TITAN)
    try:
        yield started
    finally:
        started.stop()


@dataclass
class Run:
    """A run folder and its jobs."""

    cluster: Cluster
    folder: Path  # contains the run folder outputs/ and the jobs' output files
    scripts: Path  # written by `titan slurm init`

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def submit(
        self, *command: str, hold_at: tuple[int, ...] = (HOLD_AT,), **overrides: object
    ) -> list[str]:
        """Submit a job with common options and the run's arguments; return the printed job ids."""
        self.folder.mkdir(exist_ok=True)
        env = {
            "HOLD_AT": " ".join(map(str, hold_at)),
            "NGPU": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1",  # only Slurm knows the names of the nodes
            "PET_LOCAL_ADDR": "127.0.0.1",
        }
        options = ["--cpus-per-task=2", "--output=%x-%j.out", "--time=10", "--signal=B:USR1@120"]
        run = train(self.outputs, experimental__custom_import="tests.faults.pace", **overrides)
        index = next(i for i, word in enumerate(command) if word.endswith(".slurm"))
        printed = self.cluster.run(
            *command[:index], *options, *command[index:], *run, env=env, cwd=self.folder
        )
        return printed.split()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def await_output(self, words: str, times: int = 1, timeout: float = 200) -> None:
        deadline = time.monotonic() + timeout
        while self.output().count(words) < times:
            assert time.monotonic() < deadline, (
                f"no {words!r} after {timeout:g} s:\n{self.output()[-6000:]}"
            )
            time.sleep(0.1)


def train(folder: Path, **overrides: object) -> list[str]:
    return arguments(
        folder,
        training__steps=STEPS,
        lr_scheduler__total_steps=STEPS,
        checkpoint__interval=HOLD_AT - 1,
        **overrides,
    )


SBATCH = ("sbatch", "--parsable")
TITAN = f"""#!/usr/bin/env bash
exec {sys.executable} -m torchtitan_like "$@"
"""
STUB = """#!/usr/bin/env bash
[ "$1" = train ] || exec {python} -m torchtitan_like "$@"
end() {{
  echo "{{\\"reason\\": \\"stub\\", \\"code\\": $1, \\"step\\": 0}}" >{outputs}/exit.json
  exit "$1"
}}
trap 'end 75' TERM
mkdir -p {outputs}
echo "The stub runs on $NNODES nodes"
for ((i = 0; i < 600; i++)); do
  sleep 0.1
  [ ! -e {outputs}/KILL ] || end 130
done
"""


@pytest.fixture
def stub(cluster: Cluster, tmp_path: Path) -> Run:
    """Return a run whose `titan train` only waits for a signal or the kill switch."""
    outputs = tmp_path / "job/outputs"
    write_scripts(tmp_path / "scripts", STUB.format(outputs=outputs, python=sys.executable))
    return Run(cluster, tmp_path / "job", tmp_path / "scripts")


def write_scripts(folder: Path, titan: str) -> None:
    """Write the batch scripts, and a program `titan` to which env.sh sets the PATH."""
    templates.write_scripts(folder)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "titan").write_text(titan)
    (programs / "titan").chmod(0o755)
    with (folder / "env.sh").open("a") as file:
        file.write(f'export PATH={programs}:"$PATH" PYTHONPATH={ROOT}\n')


@pytest.fixture(scope="module")
def array(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """Submit an array job of three tasks on two nodes; return the run and the job id.

    The job starts before the other tests because it mostly waits.
    """
    run = Run(cluster, tmp_path_factory.mktemp("jobs") / "array", cluster.scripts)
    [job] = run.submit(
        *SBATCH, "--array=1-3%1", "--nodes=2", str(run.scripts / "train_array.slurm")
    )
    return run, job


PREEMPTED_AT = (6, 13)


@pytest.fixture(scope="module")
def preempted(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, Future[dict[str, str]]]]:
    """Start a run that is preempted twice; return the run and Slurm's final state of its job.

    The job runs at the same time as the other tests.
    """
    run = Run(cluster, tmp_path_factory.mktemp("jobs") / "preempted", cluster.scripts)
    with ThreadPoolExecutor(1) as pool:
        yield run, pool.submit(preempt, run)


def preempt(run: Run) -> dict[str, str]:
    [job] = run.submit(
        *SBATCH, "--partition=low", str(run.scripts / "train.slurm"), hold_at=PREEMPTED_AT
    )
    for times in range(1, len(PREEMPTED_AT) + 1):
        run.await_output("Holding at step", times)
        urgent = ("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
        run.cluster.wait(run.cluster.run(*SBATCH, *urgent).strip())
    [state] = run.cluster.wait(job)
    return state


@pytest.mark.usefixtures("preempted")
def test_job_is_requeued_after_a_killed_worker(
    array: tuple[Run, str], cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path / "job", cluster.scripts)
    [job] = run.submit(*SBATCH, str(run.scripts / "train.slurm"))
    run.await_output(f"Holding at step {HOLD_AT}")
    [victim] = [process for process in psutil.process_iter() if is_rank(process, run.outputs)]
    victim.send_signal(signal.SIGKILL)
    run.await_output("Its newest checkpoint is of step 9; the job is queued again")
    shorten_time_limit(*array)
    [state] = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), run.output()[-6000:]
    assert re.findall(r"Training starts at step (\d+)", run.output()) == ["1", str(HOLD_AT)]
    assert [row[0] for row in exact_rows(run.outputs)] == list(range(1, STEPS + 1))


def shorten_time_limit(run: Run, job: str) -> None:
    """Wait until the first task runs, then shorten its time limit, so that Slurm sends USR1."""
    run.await_output(f"Holding at step {HOLD_AT}", times=2)
    run.cluster.run("scontrol", "update", f"JobId={job}_1", "EndTime=now+2minutes")


def test_chain_continues_and_kill_switch_ends_the_remaining_jobs(stub: Run) -> None:
    jobs = stub.submit(
        str(stub.scripts / "submit_chain.sh"), "4", str(stub.scripts / "train.slurm")
    )
    stub.await_output("The stub runs")
    stub.cluster.run("scancel", "--signal=USR1", "--batch", jobs[0])
    stub.await_output("The stub runs", times=2)
    switch = stub.outputs / "KILL"
    switch.touch()
    states = stub.cluster.wait(*jobs)
    assert [state["ExitCode"] for state in states] == ["75:0", "130:0", "0:0", "0:0"], stub.output()
    assert stub.output().count("the job ends: REQUEUE=0") == 1
    assert (
        stub.output().count("code 130")
        == stub.output().count("the job ends: a retry would end the same way")
        == 1
    )
    assert stub.output().count(f"Not starting: the kill switch {switch} exists") == 2
    assert switch.exists() and stub.output().count("The stub runs") == 2


def test_canceled_job_is_not_requeued(stub: Run) -> None:
    [job] = stub.submit(*SBATCH, "--nodes=2", str(stub.scripts / "train.slurm"))
    stub.await_output("The stub runs on 2 nodes", times=2)
    output = stub.cluster.run(str(stub.scripts / "on_nodes.sh"), job, "printenv", "SLURMD_NODENAME")
    assert sorted(output.splitlines()) == ["0: n1", "1: n2"]
    assert stub.cluster.run(str(stub.scripts / "hosts.sh"), "n[1-2]").split() == ["n1", "n2"]
    stub.cluster.run("scancel", job)
    [state] = stub.cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), stub.output()
    assert (stub.outputs / "exit.json").exists(), (
        "a canceled job must have time to write a checkpoint"
    )


def test_cron_job_resubmits_itself_and_submits_the_jobs_of_its_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/hello.slurm").write_text("#!/bin/bash\n#SBATCH --output=%x.out\necho done\n")
    cron = ("--job-name=cron-test", str(cluster.scripts / "cron.slurm"), "1hour", "jobs")
    job = cluster.run(*SBATCH, *cron, cwd=tmp_path).strip()
    [state] = cluster.wait(job)
    assert state["JobState"] == "COMPLETED", (tmp_path / "cron-test.out").read_text()
    queued = cluster.run("squeue", "--noheader", "--name=cron-test", "--format=%i %T %P").split()
    assert queued[1:] == ["PENDING", "all"]
    cluster.run("scancel", queued[0])
    ids = re.findall(r"Submitted batch job (\d+)", (tmp_path / "cron-test.out").read_text())
    assert ids[0] == queued[0]
    [state] = cluster.wait(ids[1])
    assert (tmp_path / "hello.slurm.out").read_text() == "done\n"


def test_ranks_of_an_allocation_pass_the_node_check(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", f"--output={tmp_path}/out")
    env = {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    job = cluster.run(
        *SBATCH, *options, str(cluster.scripts / "check_nodes.slurm"), env=env
    ).strip()
    [state] = cluster.wait(job)
    output = (tmp_path / "out").read_text()
    assert state["JobState"] == "COMPLETED", output
    assert sorted(re.findall(r"-(\d)\] is OK", output)) == ["0", "1"], output


NVIDIA_SMI = """#!/usr/bin/env bash
errors=0
[ "$SLURMD_NODENAME" != n2 ] || errors=7
echo "0, GPU-1, 40, $errors, No, No, No, Not Active"
"""


def test_bad_node_is_named_in_a_valid_sbatch_option(cluster: Cluster, tmp_path: Path) -> None:
    """A fake nvidia-smi reports a GPU with memory errors on one of two nodes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    check = f"{sys.executable} {cluster.scripts}/find_bad_nodes.py --gpus 1 --timeout 60"
    options = ("--nodes=2", f"--output={tmp_path}/out", f"--wrap={check}")
    path = f"{programs}:{cluster.scripts}/bin:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(ROOT)}
    [state] = cluster.wait(cluster.run(*SBATCH, *options, env=env).strip())
    report = (tmp_path / "out").read_text()
    assert state["ExitCode"] == "1:0", report
    *details, exclude = report.splitlines()
    assert "GPU 0: ecc.errors.uncorrected.volatile.total is 7" in details[-1], report
    assert details[-1].startswith("n2: "), report
    job = cluster.run(*SBATCH, exclude, "--output=/dev/null", "--wrap=true").strip()
    assert cluster.wait(job)[0]["NodeList"] == "n1"


RANK = """
import os, sys, time

def wait_in_a_collective():
    open(f"{sys.argv[1]}-{os.environ['RANK']}", "w").close()
    time.sleep(120)

wait_in_a_collective()
"""


def test_stacks_of_all_ranks_of_a_job_are_dumped(cluster: Cluster, tmp_path: Path) -> None:
    """Both nodes are this machine, so the script finds both ranks on each of them."""
    program, stacks = tmp_path / "rank.py", tmp_path / "stacks"
    program.write_text(RANK)
    rank = f"RANK=$SLURM_PROCID exec {sys.executable} {program} {tmp_path}/started"
    options = ("--nodes=2", "--output=/dev/null", f"--wrap=srun bash -c '{rank}'")
    job = cluster.run(*SBATCH, *options).strip()
    try:
        slurm.wait_until(
            lambda: len(list(tmp_path.glob("started-*"))) == 2, "no ranks", tmp_path, 60
        )
        # Both nodes read the same processes at the same time, so they must not pause them.
        command = (str(cluster.scripts / "pyspy_srun.sh"), job, str(stacks), "--nonblocking")
        printed = cluster.run(*command, env={"PATTERN": str(program)})
    finally:
        cluster.run("scancel", "--signal=KILL", "--full", job)
    assert set(re.findall(r"^(\d): .*-rank(\d)-\d+\.txt$", printed, re.MULTILINE)) == {
        (node, rank) for node in "01" for rank in "01"
    }, printed
    files = sorted(stacks.iterdir())
    assert [re.findall(r"-rank(\d)-", file.name) for file in files] == [["0"], ["1"]]
    assert all("wait_in_a_collective" in file.read_text() for file in files)
    assert re.search(r"^\d: +\d wait_in_a_collective", printed, re.MULTILINE), printed


@pytest.fixture(scope="module")
def fork_server() -> Iterator[Starter]:
    starter = ForkServer({})
    yield starter
    starter.close()


def reference_rows(fork_server: Starter, folder: Path, num_ranks: int) -> list[list[object]]:
    """Return the rows of the run without Slurm."""
    reference = fork_server.start(train(folder), num_ranks, folder).wait()
    assert reference.codes == [0] * num_ranks, reference.tail
    return exact_rows(folder)


def test_array_continues_after_a_time_limit_on_two_nodes(
    array: tuple[Run, str], fork_server: Starter, tmp_path: Path
) -> None:
    """One task stops before its time limit, one finishes the run, one has nothing to do."""
    run, job = array
    expected = reference_rows(fork_server, tmp_path / "outputs", 2)
    states = run.cluster.wait(*(f"{job}_{task}" for task in (1, 2, 3)))
    assert [state["ExitCode"] for state in states] == ["75:0", "0:0", "0:0"], run.output()[-9000:]
    assert "USR1: the run is asked to save and to end." in run.output()
    assert f"Nothing to do: step {STEPS} of {STEPS} is done already" in run.output()
    assert run.output().count("Building llama3") == 2 * 2, "expected two tasks on two nodes"
    assert exact_rows(run.outputs) == expected


def test_run_is_preempted_twice(
    preempted: tuple[Run, Future[dict[str, str]]], fork_server: Starter, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to every process of the job."""
    run, final_state = preempted
    expected = reference_rows(fork_server, tmp_path / "outputs", 1)
    state = final_state.result()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", str(len(PREEMPTED_AT))), (
        run.output()[-6000:]
    )
    # Each run finished the step of the signal, or one more.
    starts = [int(step) for step in re.findall(r"Training starts at step (\d+)", run.output())]
    num_steps = [step - hold_step for step, hold_step in zip(starts[1:], PREEMPTED_AT, strict=True)]
    assert starts[0] == 1 and set(num_steps) <= {1, 2}, starts
    assert exact_rows(run.outputs) == expected


def is_rank(process: psutil.Process, outputs: Path) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return (
        "torchtitan_like.train" in words
        and "torchtitan_like.torchrun" not in words
        and str(outputs) in words
    )
