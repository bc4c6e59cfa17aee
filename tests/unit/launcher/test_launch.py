"""`titan train` with a fake Python: the processes it starts, its refusals, and its exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.outputs import closed_pipe, full_disk
from tests.harness.runner import ROOT, listen_to_signals
from torchtitan_like import cli
from torchtitan_like.checkpoint.lock import RunLock
from torchtitan_like.launcher.machine import Machine
from torchtitan_like.launcher.options import LaunchError, read_options
from torchtitan_like.launcher.run import SIGNALS, child_environment
from torchtitan_like.util.bundle import TRAIN_CONFIGS

# A fake PYTHON. It logs its arguments and environment, and plays the check and the ranks.
FAKE_PYTHON = """#!/usr/bin/env bash
here={here}
trap '' PIPE # as in Python
case "$1 $2 $3" in
  "-m torchtitan_like check")
    printf '%q ' "$@" >>"$here/checks"; echo >>"$here/checks"
    cat "$here/resolved.toml"
    [ -z "${{CONFIG_CODE:-}}" ] || echo "training.stesp: no such key" >&2
    exit "${{CONFIG_CODE:-0}}" ;;
  "-m torchtitan_like.torchrun "* | "-m torchtitan_like.train "*)
    env -0 >"$here/environment"
    printf '%q ' "$@" >"$here/run"
    cd "$here" && eval "${{RUN:-true}}" ;;
  *) exec {python} "$@" ;;
esac
"""
ENDS = 'echo \'{"reason": "%s", "code": %s, "step": 7}\' >outputs/exit.json'


@dataclass
class Shell:
    """Calls `titan train` in this process, or run_train.sh, and reads the logs of the fake Python."""

    folder: Path
    env: dict[str, str]
    capfd: pytest.CaptureFixture[str]
    is_script: bool = False

    def start(
        self, *arguments: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a process of its own."""
        titan = [self.env["PYTHON"], "-m", "torchtitan_like", "train"]
        return subprocess.Popen(
            [*([str(ROOT / "run_train.sh")] if self.is_script else titan), *arguments],
            env={**self.env, **variables},
            cwd=self.folder,
            text=True,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=listen_to_signals,  # a script cannot undo what it inherits
        )

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        if self.is_script:
            process = self.start(*arguments, **variables)
            stdout, stderr = process.communicate(timeout=200)
            return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
        self.capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch, signals_restored():
            for name in {*os.environ} - self.env.keys():
                patch.delenv(name)
            for name, value in {**self.env, **variables}.items():
                patch.setenv(name, value)
            patch.chdir(self.folder)
            try:
                code = cli.main(["train", *arguments])
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, *self.capfd.readouterr())

    def read(self, name: str) -> list[str]:
        return shlex.split((self.folder / name).read_text())

    @property
    def environment(self) -> list[str]:
        return (self.folder / "environment").read_text().split("\0")

    @property
    def was_started(self) -> bool:
        return (self.folder / "run").exists()


@contextmanager
def signals_restored() -> Iterator[None]:
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.fixture
def shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    """A machine without GPUs. A test that needs some writes an nvidia-smi into `bin`."""
    python = tmp_path / "bin" / "python"
    (tmp_path / "outputs").mkdir()
    resolved = {
        "job": {"dump_folder": str(tmp_path / "outputs")},
        "training": {"steps": 300},
        "checkpoint": {"enable": True, "folder": "checkpoint"},
        "metrics": {"enable_tensorboard": True, "save_tb_folder": "tb"},
    }
    toml = "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
        for section, values in resolved.items()
    )
    (tmp_path / "resolved.toml").write_text(toml)
    executable(python, FAKE_PYTHON.format(here=shlex.quote(str(tmp_path)), python=shlex.quote(sys.executable)))
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 1\n")
    dropped = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env |= {"PYTHON": str(python), "TITAN_PYTHON": str(python), "PATH": path, "RUN": ENDS % ("done", 0)}
    return Shell(tmp_path, env, capfd)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def publish_step(shell: Shell, step: int) -> Path:
    folder = shell.folder / "outputs" / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "kind": "full", "step": step}))
    return folder


def test_a_config_that_cannot_work_returns_78_and_starts_nothing(shell: Shell) -> None:
    result = shell("--training.stesp", "3", CONFIG_CODE="78")
    assert result.returncode == 78
    assert "training.stesp: no such key" in result.stderr
    assert not shell.was_started


def test_the_check_gets_the_world_size_and_the_same_arguments(shell: Shell) -> None:
    shell("--training.steps", "3", "--job.description", "two words", NGPU="4", CONFIG_FILE="my.toml")
    arguments = ["--job.config_file", "my.toml", "--training.steps", "3", "--job.description", "two words"]
    assert shell.read("checks")[3:] == ["--training", "--device-type", "cpu", "--world-size", "4", *arguments]
    assert shell.read("run")[-len(arguments) :] == arguments


def test_torchrun_gets_the_arguments_of_torchtitan(shell: Shell) -> None:
    result = shell(CONFIG_FILE="my.toml", LOG_RANK="0,1", NGPU="3")
    torchrun = ["--nproc_per_node=3", "--nnodes=1", "--max-restarts=0"]  # for any PET_NNODES and PET_MAX_RESTARTS
    torchrun += ["--local-ranks-filter", "0,1", "--role", "rank", "--tee", "3"]
    torchrun += ["--log-dir", str(shell.folder / "outputs" / "torchrun"), "-m", "torchtitan_like.train"]
    assert shell.read("run") == ["-m", "torchtitan_like.torchrun", *torchrun, "--job.config_file", "my.toml"]
    assert "-m torchtitan_like.torchrun --nproc_per_node=3" in result.stdout


def test_one_rank_needs_no_torchrun(shell: Shell) -> None:
    assert shell(CONFIG_FILE="my.toml", NGPU="1").returncode == 0
    assert shell.read("run") == ["-m", "torchtitan_like.train", "--job.config_file", "my.toml"]


def test_variables_of_another_launcher_are_removed(shell: Shell) -> None:
    """With them, one rank without torchrun would wait for peers, and return 0 for every agreed end."""
    left = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert shell(NGPU="1", **left).returncode == 0
    assert not [line for line in shell.environment if line.partition("=")[0] in left]


DEBUG_MODEL = ["--job.config_file", str(TRAIN_CONFIGS / "debug_model.toml")]


def test_titan_train_is_one_process_by_default(shell: Shell) -> None:
    shell()
    assert shell.read("run") == ["-m", "torchtitan_like.train", *DEBUG_MODEL]


def test_run_train_starts_two_cpu_ranks_by_default_and_shows_one(shell: Shell) -> None:
    shell.is_script = True
    shell()
    run = shell.read("run")
    assert run[-2:] == DEBUG_MODEL
    assert "--nproc_per_node=2" in run
    assert run[run.index("--local-ranks-filter") + 1] == "0"


@pytest.mark.parametrize("given", [["--job.config_file", "mine.toml"], ["--job.config_file=mine.toml"]])
def test_a_config_file_on_the_command_line_is_the_only_one(shell: Shell, given: list[str]) -> None:
    shell(*given)
    assert shell.read("run")[-len(given) - 1 :] == ["torchtitan_like.train", *given]


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_all_visible_gpus_are_used(shell: Shell, variables: dict[str, str], gpus: int) -> None:
    executable(
        shell.folder / "bin" / "nvidia-smi",
        "#!/bin/sh\nfor i in 0 1 2; do echo \"GPU $i: H100 (UUID: x)\"; echo '  MIG 1g Device 0:'; done\n",
    )
    shell(NGPU="auto", **variables)
    assert f"--nproc_per_node={gpus or 2}" in shell.read("run")
    has_setting = "PYTORCH_ALLOC_CONF=expandable_segments:True" in shell.environment
    assert has_setting == (gpus > 0)
    assert ("--device-type" in shell.read("checks")) == (gpus == 0)


GPU = "GPU-{}0000000-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    ("known_bad", "is_started"),
    [("", True), ("\n \n", True), (f"{GPU.format(7)}\n", True), (f"\n{GPU.format(1)}\n", False)],
)
def test_gpus_are_listed_and_a_bad_gpu_starts_nothing(shell: Shell, known_bad: str, is_started: bool) -> None:
    lines = "".join(f"echo 'GPU {i}: H100 (UUID: {GPU.format(i)})'\n" for i in range(2))
    executable(shell.folder / "bin" / "nvidia-smi", f"#!/bin/sh\n{lines}")
    (shell.folder / "bad").write_text(known_bad)
    result = shell(KNOWN_BAD_GPUS=str(shell.folder / "bad"))
    assert result.returncode == (0 if is_started else 1) and shell.was_started == is_started
    assert f"GPU 0: H100 (UUID: {GPU.format(0)}), GPU 1: H100 (UUID: {GPU.format(1)})\n" in result.stdout
    assert (f"so nothing is started: GPU 1: H100 (UUID: {GPU.format(1)})" in result.stderr) != is_started


def test_nccl_logs_to_one_file_per_process(shell: Shell) -> None:
    folder = shell.folder / "nccl"
    assert shell(NCCL_DEBUG_TO=str(folder), NCCL_DEBUG_SUBSYS="COLL").returncode == 0
    variables = shell.environment
    assert {f"NCCL_DEBUG_FILE={folder}/nccl-%h-%p.log", "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=COLL"} <= set(variables)
    assert folder.is_dir()
    shell(NCCL_DEBUG_TO=str(folder), NCCL_DEBUG="TRACE")
    assert "NCCL_DEBUG=TRACE" in shell.environment


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_numa_binding_is_passed_to_torchrun(shell: Shell, ranks: str) -> None:
    executable(shell.folder / "bin" / "nvidia-smi", '#!/bin/sh\nfor i in 0 1 2; do echo "GPU $i: H100"; done\n')
    shell(NGPU=ranks, NUMA_BINDING="node")
    assert "--numa-binding=node" in shell.read("run") and f"--nproc_per_node={ranks}" in shell.read("run")


MACHINE = Machine(host="node-1", num_cores=6, gpu_list=[], num_gpus=0, has_amd_gpus=False)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({"NGPU": "7"}, "1"), ({"NGPU": "2"}, "3"), ({"NGPU": "1"}, "6"), ({"NGPU": "1", "OMP_NUM_THREADS": "7"}, "7")],
)
def test_ranks_share_the_cores(variables: dict[str, str], threads: str) -> None:
    environ = child_environment(variables, read_options({}, variables, MACHINE), MACHINE)
    assert environ["OMP_NUM_THREADS"] == threads
    assert environ["PYTHONUNBUFFERED"] == "1"


def test_an_option_wins_over_its_variable() -> None:
    environ = {"NGPU": "3", "MAX_RESTARTS": "5"}
    launch = read_options({"nproc": "7", "log_rank": None}, environ, MACHINE)
    assert (launch.num_ranks, launch.max_restarts) == (7, 5)


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(8, 8), (0, 2)])
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_several_machines_use_all_gpus_by_default(nnodes: str, num_gpus: int, num_ranks: int) -> None:
    machine = MACHINE._replace(num_gpus=num_gpus)
    options = {"nnodes": nnodes, "master_addr": "node-1"}
    assert read_options(options, {}, machine).num_ranks == num_ranks
    assert read_options(options, {"NGPU": "1"}, machine).num_ranks == 1
    assert read_options(options | {"nnodes": "1"}, {}, machine).num_ranks == 1


def test_several_machines_with_amd_gpus_need_a_number_of_ranks() -> None:
    machine = MACHINE._replace(has_amd_gpus=True)
    options = {"nnodes": "2", "master_addr": "node-1"}
    with pytest.raises(LaunchError, match="node-1 has AMD GPUs"):
        read_options(options, {}, machine)
    assert read_options(options | {"nproc": "4"}, {}, machine).num_ranks == 4


@pytest.mark.parametrize(("prefix", "role"), [("rank", "rank"), ("host", "node-1:"), ("digits", "1:")])
def test_lines_start_with_the_chosen_prefix(prefix: str, role: str) -> None:
    assert read_options({"log_prefix": prefix}, {}, MACHINE).role == role


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"MASTER_ADDR": "node0"},
            "--nnodes=2 --rdzv_backend c10d --rdzv_endpoint=node0:29500 --rdzv_id=torchtitan_like",
        ),
        (
            {"MASTER_ADDR": "node0", "MASTER_PORT": "1234", "NODE_RANK": "1"},
            "--nnodes=2 --node_rank=1 --master_addr=node0 --master_port=1234",
        ),
    ],
)
def test_arguments_of_several_machines(shell: Shell, variables: dict[str, str], expected: str) -> None:
    shell(NNODES="2", NGPU="4", **variables)
    assert expected in (shell.folder / "run").read_text()
    [checked] = (shell.folder / "checks").read_text().splitlines()
    assert "--training" in checked and "--world-size 8 " in checked
    run = shell.read("run")
    assert run[run.index("--role") + 1] == os.uname().nodename.split(".")[0] + ":"


def test_every_number_of_machines_is_checked(shell: Shell) -> None:
    """The check runs once for each possible number of machines."""
    shell(NNODES="2:4", NGPU="4", MASTER_ADDR="node-1", MAX_RESTARTS="3")
    run, checks = shell.read("run"), (shell.folder / "checks").read_text().splitlines()
    assert "--nnodes=2:4" in run and "--max-restarts=3" in run
    assert [line.split("--world-size ")[1].split()[0] for line in checks] == ["8", "12", "16"]


@pytest.mark.parametrize("variables", [{"NNODES": "2", "MASTER_ADDR": "n1"}, {"MAX_RESTARTS": "1"}])
def test_the_number_of_restarts_is_always_given(shell: Shell, variables: dict[str, str]) -> None:
    shell(**variables)
    restarts = [word for word in shell.read("run") if word.startswith("--max-restarts")]
    assert restarts == [f"--max-restarts={variables.get('MAX_RESTARTS', 0)}"]


def test_restarts_of_one_process_need_torchrun(shell: Shell) -> None:
    shell(NGPU="1", MAX_RESTARTS="2")
    assert {"torchtitan_like.torchrun", "--nproc_per_node=1", "--max-restarts=2"} <= set(shell.read("run"))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR"),
        ({"NNODES": "4:2", "MASTER_ADDR": "n1"}, "MIN <= MAX, got 4:2"),
        ({"NNODES": "1:x"}, "positive integers, got 'x'"),
        ({"NNODES": "1:2", "MASTER_ADDR": "n1", "NODE_RANK": "0"}, "NODE_RANK needs one number of machines"),
        ({"MAX_RESTARTS": "yes"}, "MAX_RESTARTS must be 0 or more, got 'yes'"),
        ({"NGPU": "all"}, "positive integers, got 'all'"),
        ({"NGPU": "0"}, "positive integers, got '0'"),
        ({"LOG_RANK": "abc"}, "0 to 0, with commas between them, got 'abc'"),
        ({"LOG_RANK": "0 1"}, "0 to 0, with commas between them, got '0 1'"),
        ({"LOG_RANK": "0,5"}, "0 to 0, with commas between them, got '0,5'"),
        ({"LOG_PREFIX": "name"}, "rank, host or digits, got 'name'"),
        ({"KNOWN_BAD_GPUS": "nowhere"}, "KNOWN_BAD_GPUS: cannot read nowhere"),
        ({"NUMA_BINDING": "node"}, "keeps ranks near their GPUs, and this machine has none"),
    ],
)
def test_variables_that_cannot_work_are_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_options({}, variables, MACHINE)
    assert text in str(caught.value) and caught.value.code == 78


def test_an_option_that_cannot_work_starts_nothing(shell: Shell) -> None:
    result = shell("--nnodes", "2")
    assert result.returncode == 78
    assert result.stderr == "NNODES=2 needs the address of one machine. Set MASTER_ADDR (--master-addr).\n"
    assert not shell.was_started and not (shell.folder / "checks").exists()


def test_a_secret_in_a_setting_is_not_printed(shell: Shell) -> None:
    result = shell("--job.description", "https://me:hunter2@host/path")
    assert "hunter2" not in result.stdout.partition("Logs: ")[0] and "hunter2" in (shell.folder / "run").read_text()


@pytest.mark.parametrize(
    ("run", "code", "text"),
    [
        (ENDS % ("done", 0), 0, "--prompt"),
        (ENDS % ("requeue", 75), 75, "Stopped at step 7: requeue (code 75)"),
        ("true", 1, "The run ended with code 0, but did not write"),
        ("echo [] >outputs/exit.json", 1, "exit.json does not state how the run has ended"),
        ("exit 1", 1, ""),
        (ENDS % ("done", 0) + "; exit 1", 1, ""),
    ],
)
def test_the_code_comes_from_exit_json_unless_the_run_has_crashed(shell: Shell, run: str, code: int, text: str) -> None:
    publish_step(shell, 7)
    (shell.folder / "outputs" / "exit.json").write_text('{"reason": "stale", "code": 3, "step": 1}')
    result = shell(RUN=run)
    assert result.returncode == code
    assert text in result.stdout + result.stderr
    assert ("--prompt" in result.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("run", "code"),
    [(ENDS % ("done", 0), 0), (ENDS % ("requeue", 75), 75), ("exit 1", 1), ("exit 78", 78)],
    ids=["done", "requeue", "crash", "refused"],
)
@pytest.mark.parametrize("output", [closed_pipe, full_disk])
def test_output_that_cannot_be_written_changes_no_exit_code(
    shell: Shell, output: Callable[[], AbstractContextManager[int]], run: str, code: int
) -> None:
    with output() as file:
        process = shell.start(RUN=run, stdout=file, stderr=file)
        assert process.wait(timeout=200) == code
    assert shell.was_started


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("output", [closed_pipe, full_disk])
def test_a_refused_configuration_returns_78_without_output(
    shell: Shell, output: Callable[[], AbstractContextManager[int]], buffered: str
) -> None:
    """The line about the bundled configuration is printed before the check."""
    with output() as file:
        process = shell.start(CONFIG_CODE="78", PYTHONUNBUFFERED=buffered, stdout=file, stderr=file)
        assert process.wait(timeout=200) == 78
    assert not shell.was_started


def test_closed_streams_change_no_exit_code(shell: Shell) -> None:
    command = [shell.env["PYTHON"], "-m", "torchtitan_like", "train"]
    script = f"{shlex.join(command)} >&- 2>&-"
    env = {**shell.env, "RUN": ENDS % ("requeue", 75)}
    assert subprocess.run(["bash", "-c", script], cwd=shell.folder, env=env, timeout=200).returncode == 75


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("reason", "code"), [("requeue", 75), ("bad_numbers", 70), ("bad_data", 65), ("interrupted", 130)]
)
def test_one_rank_ends_with_the_message_of_several(shell: Shell, ranks: str, reason: str, code: int) -> None:
    """torchrun's workers return 0 for an agreed end; one rank without torchrun returns the code."""
    result = shell(NGPU=ranks, RUN=ENDS % (reason, code) + (f"; exit {code}" if ranks == "1" else ""))
    assert result.returncode == code
    [words] = result.stderr.splitlines()
    assert words == f"Stopped at step 7: {reason} (code {code}); logs: {shell.folder}/outputs/attempts"


def test_an_error_that_could_not_be_recorded_is_not_reported_as_a_kill(shell: Shell) -> None:
    (shell.folder / "outputs/attempts").write_text("in the way")
    result = shell(NGPU="1", RUN="echo ValueError: the cause >&2; exit 1")
    cause, words = result.stderr.splitlines()
    assert result.returncode == 1 and cause == "ValueError: the cause"
    assert words.endswith("outputs/attempts: it was killed, or its error is above and could not be written")


@pytest.mark.parametrize(
    ("errors", "last", "code"),
    [
        (
            {0: "RuntimeError: gloo/pair.cc: Connection closed by peer", 1: "ValueError: the cause"},
            "ValueError: the cause",
            1,
        ),
        ({0: "RuntimeError: gloo/pair.cc: Connection closed by peer"}, "NO ERROR of rank 1: killed", 69),
        ({0: "ValueError: the cause"}, "ValueError: the cause", 1),
        ({}, "no rank has recorded an error", 1),
    ],
    ids=["a rank has raised", "a rank was killed", "one raised, the other was killed for it", "all were killed"],
)
def test_the_last_line_after_a_crash_is_the_first_error(
    shell: Shell, errors: dict[int, str], last: str, code: int
) -> None:
    """Errors of earlier starts, with or without an attempt folder, are not the cause of this crash."""
    now = time.time()
    leave_errors(shell.folder / "outputs/attempts/0", {0: "OSError: yesterday's"}, now - 86400)
    leave_errors(shell.folder / "outputs/attempts/1", {0: "OSError: an hour ago's"}, now - 3600)
    leave_errors(shell.folder / "new", errors, now + 60)
    result = shell(RUN="mv new outputs/attempts/2; exit 1")
    assert result.returncode == code
    end = shell.folder / "outputs/exit.json"
    assert (
        not end.exists() if code == 1 else json.loads(end.read_text()) == {"reason": "lost_peer", "code": 69, "step": 7}
    )
    assert last in result.stderr.splitlines()[-1], result.stderr
    assert not errors or ("host node-1, rank 1" if 1 in errors else "host node-0, rank 0") in result.stderr


def leave_errors(attempt: Path, errors: dict[int, str], when: float) -> None:
    """Write the records of two started ranks. The error of the higher rank is the earlier one."""
    for folder in ("errors", "heartbeat"):
        (attempt / folder).mkdir(parents=True)
    for rank in range(2):
        (attempt / f"heartbeat/rank-{rank}.json").write_text("{}")
    for rank, text in errors.items():
        record = {"time": when - rank / 1000, "host": f"node-{rank}", "rank": rank, "phase": "save", "step": 7,
                  "traceback": f"Traceback:\n{text}\n"}  # fmt: skip
        (attempt / f"errors/rank-{rank}.json").write_text(json.dumps(record))


def test_a_stale_exit_json_is_gone_when_the_run_starts(shell: Shell) -> None:
    (shell.folder / "outputs" / "exit.json").write_text('{"reason": "stale", "code": 3, "step": 1}')
    assert shell(RUN="[ ! -e outputs/exit.json ] && " + ENDS % ("done", 0)).returncode == 0


def test_a_finished_run_ends_with_three_lines(shell: Shell) -> None:
    shell.is_script = True
    publish_step(shell, 100)
    newest = publish_step(shell, 300)
    (newest.parent / "step-400").mkdir()  # without a manifest it is no checkpoint
    where, resume, sample = shell("--job.description", "two words", NGPU="1").stdout.splitlines()[-3:]
    outputs = shell.folder / "outputs"
    assert str(newest) in where and str(outputs / "metrics.jsonl") in where
    assert f"tensorboard --logdir {shlex.quote(str(outputs / 'tb'))}" in where
    typed = ["NGPU=1", str(ROOT / "run_train.sh"), "--job.description", "two words", "--training.steps", "600"]
    assert shlex.split(resume)[-6:] == typed
    assert f"generate {shlex.quote(str(newest))} --prompt" in sample


def test_the_resume_line_has_the_rendezvous_and_the_script(shell: Shell) -> None:
    shell.is_script = True
    publish_step(shell, 300)
    several = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": "node-1", "MASTER_PORT": "29511", "RDZV_ID": "run 1"}
    resume = shell(**several).stdout.splitlines()[-2]
    typed = [*(f"{name}={value}" for name, value in several.items()), str(ROOT / "run_train.sh")]
    assert shlex.split(resume)[-8:] == [*typed, "--training.steps", "600"]
    resume = shell(**several, TYPED="scripts/emulate_multinode.sh 2 1").stdout.splitlines()[-2]
    assert resume.endswith(": scripts/emulate_multinode.sh 2 1 --training.steps 600")


def test_the_resume_line_does_not_repeat_load_step(shell: Shell) -> None:
    """The resume line has more steps, so it is another command."""
    publish_step(shell, 300)
    resolved = shell.folder / "resolved.toml"
    resolved.write_text(resolved.read_text().replace("enable = true", "enable = true\nload_step = 100", 1))
    _, resume, _ = shell("--checkpoint.load_step", "100").stdout.splitlines()[-3:]
    assert shlex.split(resume)[-4:] == ["--checkpoint.load_step", "-1", "--training.steps", "600"]


@pytest.mark.parametrize(
    "given", [["--training.steps", "300"], ["--training.steps=300"], ["--training.steps", "9", "--training.steps=300"]]
)
def test_the_resume_line_replaces_options_instead_of_repeating_them(shell: Shell, given: list[str]) -> None:
    shell.is_script = True
    publish_step(shell, 300)
    description = ["--job.description", "two words"]
    result = shell(*given, *description, NGPU="2", CONFIG_FILE="my config.toml")
    words = shlex.split(result.stdout.splitlines()[-2])
    script = words.index(str(ROOT / "run_train.sh"))
    assert words[script + 1 :] == [*description, "--training.steps", "600"]
    assert words[script - 1] == "CONFIG_FILE=my config.toml"
    assert "CONFIG_FILE='my config.toml' " in result.stdout, "quoted as a whole it would be no assignment"


def test_the_last_lines_without_a_checkpoint(shell: Shell) -> None:
    lines = shell().stdout.splitlines()[-3:]
    assert "--checkpoint.enable" in lines[1]
    assert lines[2] == "Sample: needs a checkpoint"


def test_a_run_without_checkpoints_offers_no_step_of_an_older_run(shell: Shell) -> None:
    publish_step(shell, 7)
    resolved = shell.folder / "resolved.toml"
    resolved.write_text(resolved.read_text().replace("enable = true", "enable = false", 1))
    where, resume, sample = shell().stdout.splitlines()[-3:]
    assert "Checkpoint: none (checkpoint.enable is off)" in where and "step-7" not in where + resume + sample


def test_help_lists_variables_and_settings(shell: Shell) -> None:
    result = shell("--help")
    assert result.returncode == 0
    assert "[NGPU]" in result.stdout and "--training.steps" in result.stdout
    assert not shell.was_started


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the folder one stands in comes first")
def test_the_script_uses_its_own_package_in_any_folder(tmp_path: Path) -> None:
    """For example in another clone, and with CDPATH, which makes cd print the new folder."""
    (tmp_path / "torchtitan_like").mkdir()
    (tmp_path / "torchtitan_like/__init__.py").write_text("raise SystemExit('an older clone')")
    (tmp_path / "a clone").symlink_to(ROOT)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHON": sys.executable, "CDPATH": str(tmp_path)}
    command = ["bash", "a clone/run_train.sh", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0 and "--training.steps" in done.stdout, done.stderr


@pytest.mark.parametrize(("sent", "arrives"), [("SIGTERM", "TERM"), ("SIGINT", "INT"), ("SIGHUP", "TERM")])
def test_a_signal_is_passed_on_and_the_run_may_save(shell: Shell, sent: str, arrives: str) -> None:
    # torchrun ends with 1 after a signal, however well its workers have ended.
    saves = "sleep 0.5; cp end.json outputs/exit.json; exit 1"
    run = f"trap '{saves}' {arrives}; touch ready; while [ -e ready ]; do sleep 0.05; done"
    (shell.folder / "end.json").write_text('{"reason": "requeue", "code": 75, "step": 7}')
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(getattr(signal, sent))
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()  # ends the loop of a run that got no signal
    assert process.returncode == 75
    assert f"Passing SIG{arrives} on" in stderr


@pytest.mark.parametrize(("sent", "code"), [("SIGTERM", 75), ("SIGINT", 130), ("SIGHUP", 75)])
def test_a_signal_before_the_ranks_are_started_ends_with_its_code(shell: Shell, sent: str, code: int) -> None:
    """The launcher is checking the config, which takes seconds."""
    (shell.folder / "resolved.toml").unlink()
    os.mkfifo(shell.folder / "resolved.toml")  # the check waits for a writer
    process = shell.start()
    with open(shell.folder / "resolved.toml", "w"):  # returns when the check reads
        process.send_signal(getattr(signal, sent))
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == code
    assert stderr == "Stopped: nothing was started.\n" and not shell.was_started


@pytest.mark.parametrize(("sent", "reason", "code"), [("TERM", "requeue", 75), ("INT", "interrupted", 130)])
def test_a_signal_before_the_ranks_have_started_is_not_a_crash(shell: Shell, sent: str, reason: str, code: int) -> None:
    """torchrun returns 1, and no rank has written exit.json yet."""
    run = f"trap 'exit 1' {sent}; touch ready; while [ -e ready ]; do sleep 0.05; done"
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()
    assert process.returncode == code
    assert f"Stopped before the first step: {reason} (code {code})" in stderr and "crash" not in stderr
    written = json.loads((shell.folder / "outputs/exit.json").read_text())
    assert written == {"reason": reason, "code": code, "step": None}


def test_a_rank_that_is_killed_after_a_signal_is_a_crash(shell: Shell) -> None:
    """For example because it runs out of memory in its last save."""
    run = "trap 'exit 1' TERM; mkdir -p outputs/attempts/1; touch ready; while [ -e ready ]; do sleep 0.05; done"
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(signal.SIGTERM)
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()
    assert process.returncode == 1 and "The run has crashed" in stderr
    assert not (shell.folder / "outputs/exit.json").exists()


@pytest.mark.parametrize(("reason", "code"), [("requeue", 75), ("interrupted", 130)])
def test_ranks_stopped_during_imports_return_the_code_of_the_signal(shell: Shell, reason: str, code: int) -> None:
    """The signal has reached a rank, and not the launcher."""
    result = shell(RUN=f"exit {code}")
    assert result.returncode == code
    assert result.stderr.startswith(f"Stopped before the first step: {reason} (code {code})")
    assert json.loads((shell.folder / "outputs/exit.json").read_text())["code"] == code


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_rank_that_refuses_the_config_is_not_a_crash(shell: Shell, ranks: str) -> None:
    result = shell(NGPU=ranks, RUN="echo 1 problem in the configuration >&2; exit 78")
    assert result.returncode == 78
    problem, words = result.stderr.splitlines()
    assert words.startswith("Nothing was started: a rank rejected the configuration (code 78)")
    assert json.loads((shell.folder / "outputs/exit.json").read_text())["code"] == 78


@pytest.mark.parametrize("code", ["0", "74"])
def test_a_run_whose_folder_cannot_be_written_reports_its_end(shell: Shell, code: str) -> None:
    """In the temporary folder of the launcher, which the launcher removes."""
    end = '{"reason": "storage", "code": 74, "step": 7}'
    folder = "$TORCHTITAN_LIKE_LAUNCHER_FOLDER"
    result = shell(RUN=f"echo '{end}' >{folder}/exit.json; echo {folder} >folder; exit {code}")
    assert result.returncode == 74
    assert result.stderr.startswith("Stopped at step 7: storage (code 74)")
    assert not Path((shell.folder / "folder").read_text().strip()).exists()


def test_a_second_start_keeps_the_exit_json_of_a_running_run(shell: Shell) -> None:
    """The second start is refused before any rank starts. This test holds the lock of the running run."""
    steps, end = shell.folder / "outputs/checkpoint", shell.folder / "outputs/exit.json"
    end.write_text('{"reason": "done", "code": 0, "step": 9}')  # already written while old steps are being deleted
    lock = RunLock(steps)
    lock.acquire()
    try:
        result = shell()
    finally:
        lock.release()
    assert result.returncode == 74 and not shell.was_started
    assert f"belongs to a run that is alive: process {os.getpid()}" in result.stderr
    assert json.loads(end.read_text())["step"] == 9


def test_a_machine_may_join_a_running_run(shell: Shell) -> None:
    """Its ranks detect another run on this machine."""
    lock = RunLock(shell.folder / "outputs/checkpoint")
    lock.acquire()
    try:
        assert shell(NNODES="1:2", MASTER_ADDR="n1").returncode == 0
    finally:
        lock.release()
    assert shell.was_started


def test_ranks_refused_by_a_running_run_keep_its_exit_json(shell: Shell) -> None:
    """The other run may be on another machine."""
    result = shell(RUN="echo belongs to a run that is alive >&2; exit 74")
    assert result.returncode == 74 and result.stderr == "belongs to a run that is alive\n"
    assert not (shell.folder / "outputs/exit.json").exists()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_nothing_is_started_in_a_folder_that_cannot_be_written(shell: Shell) -> None:
    (shell.folder / "outputs").rmdir()
    (shell.folder / "outputs").symlink_to("/proc/self")  # a folder in which no file can be created
    result = shell()
    assert result.returncode == 74 and not shell.was_started
    assert "Nothing was started: the run folder" in result.stderr and "cannot be written" in result.stderr
