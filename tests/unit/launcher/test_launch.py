"""`titan train` with a fake Python: started processes, refusals, and exit codes."""

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
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.config import load_config
from torchtitan_like.launcher import finished_run, local_devices
from torchtitan_like.launcher.launch import LAUNCHER_SIGNALS, child_environment
from torchtitan_like.launcher.local_devices import Machine, inspect_machine
from torchtitan_like.launcher.options import LaunchError, read_options
from torchtitan_like.launcher.outcome import prepare_run_folder
from torchtitan_like.util.bundle import TRAIN_CONFIGS
from torchtitan_like.util.locks import run_lock

DEBUG_MODEL = TRAIN_CONFIGS / "debug_model.toml"
# A fake PYTHON. It logs its arguments and environment, and replaces the ranks.
FAKE_PYTHON = """#!/usr/bin/env bash
folder={folder}
trap '' PIPE # as in Python
case "$1 $2 $3" in
  "-m torchtitan_like.torchrun "* | "-m torchtitan_like.train "*)
    env -0 >"$folder/environment"
    printf '%q ' "$@" >"$folder/run"
    cd "$folder" && eval "${{RUN:-true}}" ;;
  "-m torchtitan_like run" | "-m torchtitan_like generate") eval "${{RESULTS:-true}}" ;;
  *) exec {python} "$@" ;;
esac
"""
WRITE_EXIT_JSON = 'echo \'{"reason": "%s", "code": %s, "step": 7}\' >outputs/exit.json'


@dataclass
class Shell:
    """Call `titan train` in this process, or run_train.sh. Read the logs of the fake Python."""

    folder: Path
    env: dict[str, str]
    capfd: pytest.CaptureFixture[str]
    is_script: bool = False

    def start(
        self,
        *arguments: str,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start the command in a new process."""
        titan = [self.env["PYTHON"], "-m", "torchtitan_like", "train"]
        return subprocess.Popen(
            [*([str(ROOT / "run_train.sh")] if self.is_script else titan), *arguments],
            env={**self.env, **variables},
            cwd=self.folder,
            text=True,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=listen_to_signals,  # a script cannot reset ignored signals
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
    handlers = {signum: signal.getsignal(signum) for signum in LAUNCHER_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.fixture
def shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    """A machine without GPUs. Tests with GPUs write their own nvidia-smi into `bin`."""
    python = tmp_path / "bin" / "python"
    (tmp_path / "outputs").mkdir()
    base, outputs = (json.dumps(str(path)) for path in (DEBUG_MODEL, tmp_path / "outputs"))
    text = (
        f"extends = {base}\n[job]\ndump_folder = {outputs}\nshow_results = false\n[training]\nsteps = 300\n"
        "[checkpoint]\nenable = true\n"
    )
    for name in ("debug_model.toml", "my.toml", "my config.toml"):
        (tmp_path / name).write_text(text)
    write_executable(
        python,
        FAKE_PYTHON.format(folder=shlex.quote(str(tmp_path)), python=shlex.quote(sys.executable)),
    )
    write_executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 1\n")
    removed = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env |= {
        "PYTHON": str(python),
        "TITAN_PYTHON": str(python),
        "PATH": path,
        "RUN": WRITE_EXIT_JSON % ("done", 0),
    }
    return Shell(tmp_path, env, capfd)


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def publish_step(shell: Shell, step: int) -> Path:
    folder = shell.folder / "outputs" / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    write_manifest(folder, {"kind": "full", "step": step, "files": {}})
    return folder


def test_an_invalid_config_returns_78_and_starts_nothing(shell: Shell) -> None:
    result = shell("--training.stesp", "3")
    assert result.returncode == 78
    assert 'did you mean "training.steps"?' in result.stderr
    assert not shell.was_started


def test_the_check_knows_the_number_of_ranks(shell: Shell) -> None:
    result = shell("--parallelism.tensor_parallel_degree", "3", NGPU="4")
    assert result.returncode == 78 and "parallelism.tensor_parallel_degree = 3" in result.stderr
    assert not shell.was_started


def test_ranks_get_the_arguments_as_they_were_typed(shell: Shell) -> None:
    words = ["--training.steps", "3", "--job.description", "two words"]
    shell(*words, NGPU="4", CONFIG_FILE="my.toml")
    assert shell.read("run")[-6:] == ["--job.config_file", "my.toml", *words]


def test_torchrun_gets_its_arguments(shell: Shell) -> None:
    result = shell(CONFIG_FILE="my.toml", LOG_RANK="0,1", NGPU="3")
    # Explicit numbers of machines and restarts override PET_NNODES and PET_MAX_RESTARTS.
    torchrun = ["--nproc_per_node=3", "--nnodes=1", "--max-restarts=0"]
    torchrun += ["--local-ranks-filter", "0,1", "--role", "rank", "--tee", "3"]
    torchrun += [
        "--log-dir",
        str(shell.folder / "outputs" / "torchrun"),
        "-m",
        "torchtitan_like.train",
    ]
    assert shell.read("run") == [
        "-m",
        "torchtitan_like.torchrun",
        *torchrun,
        "--job.config_file",
        "my.toml",
    ]
    assert "-m torchtitan_like.torchrun --nproc_per_node=3" in result.stdout


def test_one_rank_needs_no_torchrun(shell: Shell) -> None:
    assert shell(CONFIG_FILE="my.toml", NGPU="1").returncode == 0
    assert shell.read("run") == ["-m", "torchtitan_like.train", "--job.config_file", "my.toml"]


def test_variables_of_another_launcher_are_removed(shell: Shell) -> None:
    """A single rank would otherwise wait for peers, and return 0 for every agreed end."""
    inherited = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert shell(NGPU="1", **inherited).returncode == 0
    assert not [line for line in shell.environment if line.partition("=")[0] in inherited]


DEFAULT = ["--job.config_file", "debug_model.toml"]


def test_titan_train_is_one_process_by_default(shell: Shell) -> None:
    shell()
    assert shell.read("run") == ["-m", "torchtitan_like.train", *DEFAULT]


def test_run_train_starts_two_cpu_ranks_and_shows_one_log(shell: Shell) -> None:
    shell.is_script = True
    shell()
    run = shell.read("run")
    assert run[-2:] == DEFAULT
    assert "--nproc_per_node=2" in run
    assert run[run.index("--local-ranks-filter") + 1] == "0"


@pytest.mark.parametrize(
    "arguments", [["--job.config_file", "my.toml"], ["--job.config_file=my.toml"]]
)
def test_a_config_file_on_the_command_line_replaces_the_default(
    shell: Shell, arguments: list[str]
) -> None:
    shell(*arguments)
    assert shell.read("run")[-len(arguments) - 1 :] == ["torchtitan_like.train", *arguments]


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
    write_executable(
        shell.folder / "bin" / "nvidia-smi",
        "#!/bin/sh\nfor i in 0 1 2; do echo \"GPU $i: H100 (UUID: x)\"; echo '  MIG 1g Device 0:'; done\n",
    )
    shell(NGPU="auto", **variables)
    assert f"--nproc_per_node={gpus or 2}" in shell.read("run")


GPU = "GPU-{}0000000-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    ("known_bad", "is_started"),
    [("", True), ("\n \n", True), (f"{GPU.format(7)}\n", True), (f"\n{GPU.format(1)}\n", False)],
)
def test_nothing_starts_on_a_known_bad_gpu(shell: Shell, known_bad: str, is_started: bool) -> None:
    lines = "".join(f"echo 'GPU {i}: H100 (UUID: {GPU.format(i)})'\n" for i in range(2))
    write_executable(shell.folder / "bin" / "nvidia-smi", f"#!/bin/sh\n{lines}")
    (shell.folder / "bad").write_text(known_bad)
    result = shell(KNOWN_BAD_GPUS=str(shell.folder / "bad"))
    assert result.returncode == (0 if is_started else 1) and shell.was_started == is_started
    assert (
        f"GPU 0: H100 (UUID: {GPU.format(0)}), GPU 1: H100 (UUID: {GPU.format(1)})\n"
        in result.stdout
    )
    assert (
        f"has known bad GPUs: GPU 1: H100 (UUID: {GPU.format(1)})" in result.stderr
    ) != is_started


def test_nccl_logs_to_one_file_per_process(shell: Shell) -> None:
    folder = shell.folder / "nccl"
    assert shell(NCCL_DEBUG_TO=str(folder), NCCL_DEBUG_SUBSYS="COLL").returncode == 0
    variables = shell.environment
    assert {
        f"NCCL_DEBUG_FILE={folder}/nccl-%h-%p.log",
        "NCCL_DEBUG=INFO",
        "NCCL_DEBUG_SUBSYS=COLL",
    } <= set(variables)
    assert folder.is_dir()
    shell(NCCL_DEBUG_TO=str(folder), NCCL_DEBUG="TRACE")
    assert "NCCL_DEBUG=TRACE" in shell.environment


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_numa_binding_is_passed_to_torchrun(shell: Shell, ranks: str) -> None:
    write_executable(
        shell.folder / "bin" / "nvidia-smi",
        '#!/bin/sh\nfor i in 0 1 2; do echo "GPU $i: H100"; done\n',
    )
    shell(NGPU=ranks, NUMA_BINDING="node")
    assert "--numa-binding=node" in shell.read("run") and f"--nproc_per_node={ranks}" in shell.read(
        "run"
    )


MACHINE = Machine("node-1", num_cores=6, gpu_list=[], num_nvidia_gpus=0, num_amd_gpus=0)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"NGPU": "7"}, "1"),
        ({"NGPU": "2"}, "3"),
        ({"NGPU": "1"}, "6"),
        ({"NGPU": "1", "OMP_NUM_THREADS": "7"}, "7"),
    ],
)
def test_ranks_share_the_cores(variables: dict[str, str], threads: str) -> None:
    environ = child_environment(variables, read_options({}, variables, MACHINE), MACHINE)
    assert environ["OMP_NUM_THREADS"] == threads
    assert environ["PYTHONUNBUFFERED"] == "1"


def test_options_take_precedence_over_variables() -> None:
    environ = {"NGPU": "3", "MAX_RESTARTS": "5"}
    launch = read_options({"nproc": "7", "log_rank": None}, environ, MACHINE)
    assert (launch.num_ranks, launch.max_restarts) == (7, 5)


@pytest.mark.parametrize("vendor", ["num_nvidia_gpus", "num_amd_gpus"])
@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(8, 8), (0, 2)])
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_several_machines_use_all_gpus_by_default(
    nnodes: str, num_gpus: int, num_ranks: int, vendor: str
) -> None:
    node = MACHINE._replace(**{vendor: num_gpus})
    options = {"nnodes": nnodes, "master_addr": "node-1"}
    assert read_options(options, {}, node).num_ranks == num_ranks
    assert read_options(options, {"NGPU": "1"}, node).num_ranks == 1
    assert read_options(options | {"nnodes": "1"}, {}, node).num_ranks == 1


LIBCUDA = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""


def test_the_driver_counts_named_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows one of two parts of a divided GPU. Indices need no driver."""
    (tmp_path / "cuda.c").write_text(LIBCUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", library, tmp_path / "cuda.c"], check=True)
    monkeypatch.setattr(local_devices, "_list_gpus", lambda: ["GPU 0: H100", "GPU 1: H100"])
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "MIG-1f2e,MIG-3d4c"}
    assert local_devices.inspect_machine(environment).num_nvidia_gpus == 1
    environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert local_devices.inspect_machine(environment).num_nvidia_gpus == 2
    library.write_text("no library")
    environment["CUDA_VISIBLE_DEVICES"] = "MIG-1f2e,MIG-3d4c"
    assert local_devices.inspect_machine(environment).num_nvidia_gpus == 2


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [
        (None, 3),
        ("2, 0", 2),
        ("0,-1,2", 1),
        ("0,3,1", 1),
        ("0,,1", 1),
        ("0,1,0", 0),
        ("GPU-8932f937,GPU-d5c5a1b2", 2),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str | None, num_gpus: int) -> None:
    assert local_devices.count_visible(3, visible) == num_gpus


@pytest.mark.parametrize(
    ("variables", "num_gpus"),
    [
        ({}, 3),
        ({"ROCR_VISIBLE_DEVICES": "0,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),  # HIP reads it too
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_amd_gpus_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int
) -> None:
    """Five nodes of AMD's driver: a CPU, three GPUs, and the GPU of another container."""
    monkeypatch.setattr(local_devices, "AMD_NODES", tmp_path / "nodes")
    monkeypatch.setattr(local_devices, "RENDER_DEVICES", tmp_path / "dri")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    (tmp_path / "dri").mkdir()
    assert inspect_machine(variables).num_gpus == 0
    for node, (simd_count, minor) in enumerate([(0, 0), *((416, 128 + i) for i in range(4))]):
        folder = tmp_path / f"nodes/{node}"
        folder.mkdir(parents=True)
        lines = f"cpu_cores_count 0\nsimd_count {simd_count}\ndrm_render_minor {minor}\n"
        (folder / "properties").write_text(lines)
        if node < 4:
            (tmp_path / f"dri/renderD{minor}").touch()
    inspected = inspect_machine(variables)
    assert (inspected.num_nvidia_gpus, inspected.num_amd_gpus) == (0, num_gpus)
    assert inspected.num_gpus == num_gpus


@pytest.mark.parametrize(
    ("prefix", "role"), [("rank", "rank"), ("host", "node-1:"), ("digits", "1:")]
)
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
def test_arguments_of_several_machines(
    shell: Shell, variables: dict[str, str], expected: str
) -> None:
    shell(NNODES="2", NGPU="4", **variables)
    assert expected in (shell.folder / "run").read_text()
    run = shell.read("run")
    assert run[run.index("--role") + 1] == os.uname().nodename.split(".")[0] + ":"


def test_the_check_covers_every_number_of_machines(shell: Shell) -> None:
    variables = {"NNODES": "2:4", "NGPU": "4", "MASTER_ADDR": "node-1", "MAX_RESTARTS": "3"}
    assert shell(**variables).returncode == 0
    run = shell.read("run")
    assert "--nnodes=2:4" in run and "--max-restarts=3" in run
    result = shell("--training.global_batch_size", "64", **variables)  # 12 ranks x 4 samples
    assert result.returncode == 78 and "training.global_batch_size = 64" in result.stderr


@pytest.mark.parametrize("variables", [{"NNODES": "2", "MASTER_ADDR": "n1"}, {"MAX_RESTARTS": "1"}])
def test_the_number_of_restarts_is_always_given(shell: Shell, variables: dict[str, str]) -> None:
    shell(**variables)
    restarts = [word for word in shell.read("run") if word.startswith("--max-restarts")]
    assert restarts == [f"--max-restarts={variables.get('MAX_RESTARTS', 0)}"]


def test_restarts_of_one_process_need_torchrun(shell: Shell) -> None:
    shell(NGPU="1", MAX_RESTARTS="2")
    assert {"torchtitan_like.torchrun", "--nproc_per_node=1", "--max-restarts=2"} <= set(
        shell.read("run")
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR"),
        (
            {"NNODES": "4:2", "MASTER_ADDR": "n1"},
            "NNODES=4:2 (--nnodes) has a minimum above its maximum. Expected MIN:MAX.",
        ),
        ({"NNODES": "1:x"}, "NNODES='1:x' (--nnodes) is not valid. Expected an integer above 0"),
        (
            {"NNODES": "1:2", "MASTER_ADDR": "n1", "NODE_RANK": "0"},
            "is a range. Expected one number of machines",
        ),
        (
            {"MAX_RESTARTS": "yes"},
            "MAX_RESTARTS='yes' (--max-restarts) is not valid. Expected an integer",
        ),
        (
            {"NGPU": "all"},
            "NGPU='all' (--nproc) is not valid. Expected an integer above 0, or auto.",
        ),
        ({"NGPU": "0"}, "NGPU='0' (--nproc) is not valid."),
        (
            {"LOG_RANK": "abc"},
            "LOG_RANK='abc' (--log-rank) is not valid. Expected ranks of this machine, with commas",
        ),
        (
            {"LOG_RANK": "0 1"},
            "LOG_RANK='0 1' (--log-rank) is not valid. Expected ranks of this machine, with commas",
        ),
        (
            {"LOG_RANK": "0,5"},
            "a rank that does not exist. Expected ranks of this machine, 0 to 0. Correct the list.",
        ),
        (
            {"LOG_PREFIX": "name"},
            "LOG_PREFIX='name' (--log-prefix) is not valid. Expected rank, host or digits.",
        ),
        ({"KNOWN_BAD_GPUS": "nowhere"}, "KNOWN_BAD_GPUS: cannot read nowhere"),
        ({"NUMA_BINDING": "node"}, "near their GPUs. Expected a machine with GPUs."),
        (
            {"NUMA_BINDING": "core"},
            "NUMA_BINDING='core' (--numa-binding) is not valid. Expected node, socket,",
        ),
        ({"NODE_RANK": "a"}, "NODE_RANK='a' (--node-rank) is not valid. Expected an integer"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' (--master-port) is not valid."),
    ],
)
def test_invalid_variables_are_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_options({}, variables, MACHINE)
    assert text in str(caught.value) and caught.value.code == 2


def test_an_invalid_option_starts_nothing(shell: Shell) -> None:
    result = shell("--nnodes", "2")
    assert result.returncode == 2
    assert (
        result.stderr
        == "NNODES=2 (--nnodes) is set without MASTER_ADDR. Expected the address of one of the "
        "machines. Set MASTER_ADDR (--master-addr).\n"
    )
    assert not shell.was_started


def test_a_secret_in_a_setting_is_not_printed(shell: Shell) -> None:
    result = shell("--job.description", "https://me:hunter2@host/path")
    assert (
        "hunter2" not in result.stdout.partition("Logs: ")[0]
        and "hunter2" in (shell.folder / "run").read_text()
    )


@pytest.mark.parametrize(
    ("run", "code", "text"),
    [
        (WRITE_EXIT_JSON % ("done", 0), 0, "--prompt"),
        (WRITE_EXIT_JSON % ("requeue", 75), 75, "stopped: requeue (code 75) at step 7"),
        (WRITE_EXIT_JSON % ("requeue", 75), 75, "Resume at step 7 (the same command): "),
        ("true", 1, "The run ended with code 0, but did not write"),
        ("echo [] >outputs/exit.json", 1, "exit.json is malformed: "),
        ("exit 1", 1, ""),
        (WRITE_EXIT_JSON % ("done", 0) + "; exit 1", 1, ""),
    ],
)
def test_exit_json_determines_the_code_unless_the_run_crashed(
    shell: Shell, run: str, code: int, text: str
) -> None:
    publish_step(shell, 7)
    (shell.folder / "outputs" / "exit.json").write_text('{"reason": "stale", "code": 3, "step": 1}')
    result = shell(RUN=run)
    assert result.returncode == code
    assert text in result.stdout + result.stderr
    assert ("--prompt" in result.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (WRITE_EXIT_JSON % ("done", 0), 0),
        (WRITE_EXIT_JSON % ("requeue", 75), 75),
        ("exit 1", 1),
        ("exit 78", 78),
    ],
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
    """Printing the path of a configuration of the package fails before the check."""
    (shell.folder / "debug_model.toml").unlink()
    with output() as file:
        process = shell.start(
            "--training.stesp=3", PYTHONUNBUFFERED=buffered, stdout=file, stderr=file
        )
        assert process.wait(timeout=200) == 78
    assert not shell.was_started


def test_closed_streams_change_no_exit_code(shell: Shell) -> None:
    command = [shell.env["PYTHON"], "-m", "torchtitan_like", "train"]
    script = f"{shlex.join(command)} >&- 2>&-"
    env = {**shell.env, "RUN": WRITE_EXIT_JSON % ("requeue", 75)}
    assert (
        subprocess.run(["bash", "-c", script], cwd=shell.folder, env=env, timeout=200).returncode
        == 75
    )


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("reason", "code"),
    [("requeue", 75), ("bad_numbers", 70), ("bad_data", 65), ("interrupted", 130)],
)
def test_one_rank_and_two_ranks_end_with_the_same_message(
    shell: Shell, ranks: str, reason: str, code: int
) -> None:
    """Workers of torchrun return 0 for an agreed end. Without torchrun, a rank returns the code."""
    result = shell(
        NGPU=ranks,
        RUN=WRITE_EXIT_JSON % (reason, code) + (f"; exit {code}" if ranks == "1" else ""),
    )
    assert result.returncode == code
    [message] = result.stderr.splitlines()
    assert (
        message
        == f"stopped: {reason} (code {code}) at step 7; logs: {shell.folder}/outputs/attempts"
    )


def test_an_unrecorded_error_is_not_reported_as_a_kill(shell: Shell) -> None:
    (shell.folder / "outputs/attempts").write_text("in the way")
    result = shell(NGPU="1", RUN="echo ValueError: the cause >&2; exit 1")
    error, message = result.stderr.splitlines()
    assert result.returncode == 1 and error == "ValueError: the cause"
    assert message.startswith("stopped: killed, or its error is above and could not be written")


@pytest.mark.parametrize(
    ("errors", "last", "code"),
    [
        (
            {
                0: "RuntimeError: gloo/pair.cc: Connection closed by peer",
                1: "ValueError: the cause",
            },
            "ValueError: the cause",
            1,
        ),
        (
            {0: "RuntimeError: gloo/pair.cc: Connection closed by peer"},
            "no error of rank 1: killed",
            69,
        ),
        ({0: "ValueError: the cause"}, "ValueError: the cause", 1),
        ({}, "stopped: killed, or its error is above", 1),
    ],
    ids=[
        "one rank raised",
        "one rank was killed",
        "one rank raised and the other was killed",
        "all ranks were killed",
    ],
)
def test_the_last_line_after_a_crash_reports_the_first_error(
    shell: Shell, errors: dict[int, str], last: str, code: int
) -> None:
    """Errors of earlier attempts did not cause this crash."""
    now = time.time()
    record_errors(shell.folder / "outputs/attempts/0", {0: "OSError: one day old"}, now - 86400)
    record_errors(shell.folder / "outputs/attempts/1", {0: "OSError: one hour old"}, now - 3600)
    record_errors(shell.folder / "new", errors, now + 60)
    publish_step(shell, 6)
    result = shell(RUN="mv new outputs/attempts/2; exit 1")
    assert result.returncode == code
    assert ("Resume at step 6 (the same command): " in result.stderr) == (code == 69)
    end = shell.folder / "outputs/exit.json"
    assert (
        not end.exists()
        if code == 1
        else json.loads(end.read_text()) == {"reason": "lost_peer", "code": 69, "step": 7}
    )
    assert last in result.stderr.splitlines()[-1], result.stderr
    assert (
        not errors
        or ("host node-1, rank 1" if 1 in errors else "host node-0, rank 0") in result.stderr
    )


def record_errors(attempt: Path, errors: dict[int, str], when: float) -> None:
    """Write error records of two ranks. The error of rank 1 is earlier."""
    for folder in ("errors", "heartbeat"):
        (attempt / folder).mkdir(parents=True)
    for rank in range(2):
        (attempt / f"heartbeat/rank-{rank}.json").write_text("{}")
    for rank, text in errors.items():
        record = {"time": when - rank / 1000, "host": f"node-{rank}", "rank": rank, "phase": "save", "step": 7,
                  "traceback": f"Traceback:\n{text}\n"}  # fmt: skip
        (attempt / f"errors/rank-{rank}.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("rank", "code"), [(0, 75), (8, 0)])
def test_a_machine_starts_again_if_another_one_already_does(
    shell: Shell, rank: int, code: int
) -> None:
    """The other one has removed exit.json. Without a heartbeat of rank 0, its folder is elsewhere."""
    run = f"mkdir -p outputs/attempts/1/heartbeat; echo {{}} >outputs/attempts/1/heartbeat/rank-{rank}.json"
    result = shell(NNODES="2", MASTER_ADDR="n1", RUN=run)
    assert result.returncode == code, result.stderr
    assert ("another machine has removed" in result.stderr) == (code == 75)


def test_a_stale_exit_json_is_deleted_before_the_run_starts(shell: Shell) -> None:
    (shell.folder / "outputs" / "exit.json").write_text('{"reason": "stale", "code": 3, "step": 1}')
    assert (
        shell(RUN="[ ! -e outputs/exit.json ] && " + WRITE_EXIT_JSON % ("done", 0)).returncode == 0
    )


def test_a_finished_run_ends_with_three_lines(shell: Shell) -> None:
    shell.is_script = True
    publish_step(shell, 100)
    newest = publish_step(shell, 300)
    (newest.parent / "step-400").mkdir()  # a folder without a manifest is not a checkpoint
    outputs_line, resume_line, sample_line = shell(
        "--job.description", "two words", NGPU="1"
    ).stdout.splitlines()[-3:]
    outputs = shell.folder / "outputs"
    assert str(newest) in outputs_line and str(outputs / "metrics.jsonl") in outputs_line
    assert f"tensorboard --logdir {shlex.quote(str(outputs / 'tb'))}" in outputs_line
    command = [
        "NGPU=1",
        str(ROOT / "run_train.sh"),
        "--job.description",
        "two words",
        "--training.steps",
        "600",
    ]
    assert shlex.split(resume_line)[-6:] == command
    assert f"generate {shlex.quote(str(newest))} --prompt" in sample_line


def test_the_resume_line_repeats_variables_and_script(shell: Shell) -> None:
    shell.is_script = True
    publish_step(shell, 300)
    variables = {
        "NGPU": "1",
        "NNODES": "2",
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "29511",
        "RDZV_ID": "run 1",
    }
    resume = shell(**variables).stdout.splitlines()[-2]
    command = [
        *(f"{name}={value}" for name, value in variables.items()),
        str(ROOT / "run_train.sh"),
    ]
    assert shlex.split(resume)[-8:] == [*command, "--training.steps", "600"]
    resume = shell(**variables, TYPED="scripts/emulate_multinode.sh 2 1").stdout.splitlines()[-2]
    assert resume.endswith(": scripts/emulate_multinode.sh 2 1 --training.steps 600")


def test_the_resume_line_resets_load_step(shell: Shell) -> None:
    """A larger number of steps must not load the old step again."""
    publish_step(shell, 100)
    publish_step(shell, 300)
    _, resume, _ = shell("--checkpoint.load_step", "100").stdout.splitlines()[-3:]
    assert shlex.split(resume)[-4:] == ["--checkpoint.load_step", "-1", "--training.steps", "600"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.steps", "300"],
        ["--training.steps=300"],
        ["--training.steps", "9", "--training.steps=300"],
    ],
)
def test_the_resume_line_replaces_options_instead_of_repeating_them(
    shell: Shell, arguments: list[str]
) -> None:
    shell.is_script = True
    publish_step(shell, 300)
    description = ["--job.description", "two words"]
    result = shell(*arguments, *description, NGPU="2", CONFIG_FILE="my config.toml")
    command = shlex.split(result.stdout.splitlines()[-2])
    script = command.index(str(ROOT / "run_train.sh"))
    assert command[script + 1 :] == [*description, "--training.steps", "600"]
    assert command[script - 1] == "CONFIG_FILE=my config.toml"
    assert "CONFIG_FILE='my config.toml' " in result.stdout, "expected quotes around the value only"


def test_last_lines_of_a_run_without_a_checkpoint(shell: Shell) -> None:
    lines = shell().stdout.splitlines()[-3:]
    assert "--checkpoint.enable" in lines[1]
    assert lines[2] == "Sample: needs a checkpoint"


def test_a_finished_run_shows_a_page_and_a_text(shell: Shell) -> None:
    step = publish_step(shell, 300)
    page = shell.folder / "outputs/report.html"
    commands = shell.folder / "commands"
    printed = f'echo "$*" >>{shlex.quote(str(commands))}; echo " The"; echo "king"; echo'
    result = shell("--job.show_results", RESULTS=printed)
    assert result.returncode == 0 and result.stderr == ""
    sample, *shown = result.stdout.splitlines()[-5:]
    assert sample.startswith("Sample: ")
    assert shown == [f"Page: {page}", f"Text from {step.name}:", " The", "king"]
    assert commands.read_text().splitlines() == [
        f"-m torchtitan_like run report {page.parent} -o {page}",
        f"-m torchtitan_like generate {step} --prompt The --num-tokens 60",
    ]


@pytest.mark.parametrize(
    ("results_of_run", "reason"),
    [
        ("echo Traceback >&2; echo 'It needs Bokeh' >&2; exit 2", "It needs Bokeh"),
        ("kill -9 $$", "it ended with code -9"),
        ("exec sleep 60", "it took more than 0.2 s"),
    ],
)
def test_a_result_that_fails_is_one_warning(
    shell: Shell, results_of_run: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in results_of_run:
        monkeypatch.setattr(finished_run, "SECONDS", 0.2)
    publish_step(shell, 300)
    result = shell("--job.show_results", RESULTS=results_of_run)
    assert result.returncode == 0 and result.stdout.splitlines()[-1].startswith("Sample: ")
    assert result.stderr.splitlines() == [
        f"No page was written: {reason}",
        f"No text was generated: {reason}",
    ]


@pytest.mark.parametrize(
    ("arguments", "variables", "shown"),
    [
        (["--checkpoint.no_enable"], {}, ["Page"]),
        (["--model.flavor", "1B"], {}, ["Page"]),  # too large for a text in seconds
        (["--job.show_results=false"], {}, []),
        ([], {"SLURM_JOB_ID": "1"}, []),
        ([], {"NNODES": "2", "MASTER_ADDR": "node-1"}, []),
        ([], {"RUN": WRITE_EXIT_JSON % ("requeue", 75)}, []),
    ],
)
def test_results_are_shown_where_they_are_cheap(
    shell: Shell, arguments: list[str], variables: dict[str, str], shown: list[str]
) -> None:
    publish_step(shell, 300)
    result = shell("--job.show_results", *arguments, **variables)
    assert (shell.was_started, result.returncode) == (True, 75 if "RUN" in variables else 0)
    lines = result.stdout.splitlines()
    assert [
        line.split()[0].rstrip(":") for line in lines if line[:5] in ("Page:", "Text ")
    ] == shown


def test_a_run_without_checkpoints_names_no_step_of_an_older_run(shell: Shell) -> None:
    publish_step(shell, 7)
    outputs_line, resume_line, sample_line = shell("--checkpoint.no_enable").stdout.splitlines()[
        -3:
    ]
    assert (
        "Checkpoint: none (checkpoint.enable is off)" in outputs_line
        and "step-7" not in outputs_line + resume_line + sample_line
    )


def test_help_lists_variables_and_settings(shell: Shell) -> None:
    result = shell("--help")
    assert result.returncode == 0
    assert "[NGPU]" in result.stdout and "--training.steps" in result.stdout
    assert not shell.was_started


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 imports from the working folder first"
)
def test_the_script_imports_its_own_clone_in_any_folder(tmp_path: Path) -> None:
    """Also inside another clone, and with CDPATH, which makes cd print the new folder."""
    (tmp_path / "torchtitan_like").mkdir()
    (tmp_path / "torchtitan_like/__init__.py").write_text("raise SystemExit('an older clone')")
    (tmp_path / "a clone").symlink_to(ROOT)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHON": sys.executable, "CDPATH": str(tmp_path)}
    command = ["bash", "a clone/run_train.sh", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=200
    )
    assert done.returncode == 0 and "--training.steps" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("sent", "received"), [("SIGTERM", "TERM"), ("SIGINT", "INT"), ("SIGHUP", "TERM")]
)
def test_a_signal_is_forwarded_and_the_run_may_save(shell: Shell, sent: str, received: str) -> None:
    # torchrun returns 1 after a signal, even if its workers return 0.
    handler = "sleep 0.5; cp end.json outputs/exit.json; exit 1"
    run = f"trap '{handler}' {received}; touch ready; while [ -e ready ]; do sleep 0.05; done"
    (shell.folder / "end.json").write_text('{"reason": "requeue", "code": 75, "step": 7}')
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(getattr(signal, sent))
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()  # ends the loop if the run received no signal
    assert process.returncode == 75
    assert f"Passing SIG{received} on" in stderr


@pytest.mark.parametrize(("sent", "code"), [("SIGTERM", 75), ("SIGINT", 130), ("SIGHUP", 75)])
def test_a_signal_during_the_check_returns_the_code_of_the_signal(
    shell: Shell, sent: str, code: int
) -> None:
    """The check may import a module of the user, which may catch every Exception."""
    os.mkfifo(shell.folder / "fifo")
    waiting = "try:\n    open('fifo').read()\nexcept Exception:\n    pass\n"
    (shell.folder / "waiting.py").write_text(waiting)
    process = shell.start("--experimental.custom_import", "waiting.py")
    with open(shell.folder / "fifo", "w"):  # returns when the module reads
        process.send_signal(getattr(signal, sent))
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == code
    assert stderr == "Stopped: nothing was started.\n" and not shell.was_started


@pytest.mark.parametrize(
    ("sent", "reason", "code"), [("TERM", "requeue", 75), ("INT", "interrupted", 130)]
)
def test_a_signal_before_the_first_step_is_not_a_crash(
    shell: Shell, sent: str, reason: str, code: int
) -> None:
    """torchrun returns 1 before any rank writes exit.json."""
    run = f"trap 'exit 1' {sent}; touch ready; while [ -e ready ]; do sleep 0.05; done"
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()
    assert process.returncode == code
    assert (
        f"stopped: {reason} (code {code}) before the first step" in stderr and "crash" not in stderr
    )
    written = json.loads((shell.folder / "outputs/exit.json").read_text())
    assert written == {"reason": reason, "code": code, "step": None}


def test_a_rank_killed_after_a_signal_is_a_crash(shell: Shell) -> None:
    """For example, if it runs out of memory while saving."""
    run = "trap 'exit 1' TERM; mkdir -p outputs/attempts/1; touch ready; while [ -e ready ]; do sleep 0.05; done"
    process = shell.start(RUN=run)
    wait_for(shell.folder / "ready")
    process.send_signal(signal.SIGTERM)
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        (shell.folder / "ready").unlink()
    assert process.returncode == 1 and "stopped: killed, or its error" in stderr
    assert not (shell.folder / "outputs/exit.json").exists()


@pytest.mark.parametrize(("reason", "code"), [("requeue", 75), ("interrupted", 130)])
def test_ranks_stopped_during_imports_return_the_code_of_the_signal(
    shell: Shell, reason: str, code: int
) -> None:
    """Only the ranks received the signal, not the launcher."""
    result = shell(RUN=f"exit {code}")
    assert result.returncode == code
    assert result.stderr.startswith(f"stopped: {reason} (code {code}) before the first step")
    assert json.loads((shell.folder / "outputs/exit.json").read_text())["code"] == code


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_config_refused_by_a_rank_is_not_a_crash(shell: Shell, ranks: str) -> None:
    result = shell(NGPU=ranks, RUN="echo 1 problem in the configuration >&2; exit 78")
    assert result.returncode == 78
    problem, message = result.stderr.splitlines()
    assert message.startswith("Nothing was started: a rank rejected the configuration (code 78)")
    assert json.loads((shell.folder / "outputs/exit.json").read_text())["code"] == 78


@pytest.mark.parametrize("code", ["0", "74"])
def test_a_run_with_an_unwritable_folder_reports_how_it_ended(shell: Shell, code: str) -> None:
    """It writes exit.json to the temporary folder of the launcher, which the launcher removes.

    The run creates the folder: a killed launcher would leave its own.
    """
    end = '{"reason": "storage", "code": 74, "step": 7}'
    folder = "$TORCHTITAN_LIKE_LAUNCHER_FOLDER"
    result = shell(
        RUN=f"mkdir {folder}; echo '{end}' >{folder}/exit.json; echo {folder} >folder; exit {code}"
    )
    assert result.returncode == 74
    assert result.stderr.startswith("stopped: storage (code 74) at step 7")
    assert not Path((shell.folder / "folder").read_text().strip()).exists()


def test_a_second_start_keeps_the_exit_json_of_an_active_run(shell: Shell) -> None:
    """The launcher refuses before any rank starts. The test holds the lock of the active run."""
    steps, end = shell.folder / "outputs/checkpoint", shell.folder / "outputs/exit.json"
    # The active run has written exit.json and is deleting old steps.
    end.write_text('{"reason": "done", "code": 0, "step": 9}')
    lock = run_lock(steps)
    lock.acquire()
    try:
        result = shell()
    finally:
        lock.release()
    assert result.returncode == 74 and not shell.was_started
    assert f"belongs to a run that is alive: process {os.getpid()}" in result.stderr
    assert json.loads(end.read_text())["step"] == 9


def test_a_machine_may_join_an_active_run(shell: Shell) -> None:
    """The ranks themselves detect another run on this machine."""
    lock = run_lock(shell.folder / "outputs/checkpoint")
    lock.acquire()
    try:
        assert shell(NNODES="1:2", MASTER_ADDR="n1").returncode == 0
    finally:
        lock.release()
    assert shell.was_started


def test_ranks_refused_by_an_active_run_keep_its_exit_json(shell: Shell) -> None:
    """The other run may be on another machine."""
    result = shell(RUN="echo belongs to a run that is alive >&2; exit 74")
    assert result.returncode == 74 and result.stderr == "belongs to a run that is alive\n"
    assert not (shell.folder / "outputs/exit.json").exists()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_nothing_starts_in_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to("/proc/self")  # a folder in which no file can be created
    config = load_config(["--job.dump_folder", str(tmp_path / "outputs")])
    with pytest.raises(LaunchError, match="the run folder .* cannot be written") as caught:
        prepare_run_folder(config, 1)
    assert caught.value.code == 74
