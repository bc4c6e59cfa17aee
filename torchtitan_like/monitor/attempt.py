"""Write the files of one attempt: its configuration, environment, events and errors.

`torchtitan_like.util.run_directory` documents the whole run directory and reads it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.monitor.log import add_file, logger
from torchtitan_like.monitor.memory import cpu_model, host_memory_bytes
from torchtitan_like.util import run_directory
from torchtitan_like.util.credentials import is_secret_name, mask_text, mask_values
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import (
    AppendOnlyFile,
    WriteFailures,
    storage_error,
    write_atomically,
)
from torchtitan_like.util.host import num_cores
from torchtitan_like.util.jsonl import encode
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.version import git_output, has_tracked_files, recorded_commit

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Job
    from torchtitan_like.distributed.world import World


class Attempt:
    """One start of the job, of all its ranks together: ``attempts/<n>`` in the run directory.

    ``number=None`` makes the folder of the next free number, on rank 0 alone. Other ranks pass the
    number of rank 0 and make nothing. Only rank 0 calls the methods that write.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        number: int | None = None,
        wall_clock: Callable[[], float] = time.time,
        failures: WriteFailures | None = None,
    ) -> None:
        self.run = Path(run)
        self._wall_clock = wall_clock
        self.failures = WriteFailures() if failures is None else failures
        self._events = AppendOnlyFile(self.run / run_directory.EVENTS)
        if number is None:
            number = _make_folder(self.run)
            _end_last_line(self._events.path)
            _remove_unfinished(self.run, number - 1)
        self.number = number
        self.folder = run_directory.attempt_folder(self.run, number)

    def write_config(self, toml_text: str) -> None:
        """Write the resolved configuration of this attempt, and the same as the newest of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / run_directory.CONFIG, toml_text)
        write_atomically(self.run / run_directory.CONFIG, toml_text)

    def capture_environment(self) -> threading.Thread:
        """Write ``environment/`` in a thread: git and a slow disk must not delay the first step.

        Python joins the thread at exit. A failed write is recorded in the failures of the run. Any
        other error is logged as a warning and does not end the run.
        """
        folder = self.folder / run_directory.ENVIRONMENT

        def capture() -> None:
            try:
                with self.failures.recording(folder):
                    write_environment(folder)
            except Exception as error:
                logger.warning(f"The environment could not be recorded in {self.folder}: {error!r}")

        thread = threading.Thread(target=capture, name="environment")
        thread.start()
        return thread

    def event(self, kind: str, **fields: object) -> None:
        """Append one line to events.jsonl: ``{"event": kind, "time": seconds, "attempt": n, ...}``."""
        row = {"event": kind, "time": self._wall_clock(), "attempt": self.number, **fields}
        with self.failures.recording(self._events.path):
            self._events.append(encode(row))
            self._events.close()

    def end(self, code: ExitCode, cause: str, step: int, *, is_leader: bool) -> None:
        """Log why training ends. The leader also writes the event `stop`."""
        if is_leader:
            self.event("stop", reason=code.reason, cause=cause, code=int(code), step=step)
        is_done = code is ExitCode.DONE
        logger.info(
            "Training completed" if is_done else f"Training stopped: {code.reason} ({cause})",
            extra=on_screen(),
        )

    def remove_exit(self) -> None:
        """Remove the exit.json of the previous attempt: the file always describes the newest one."""
        (self.run / run_directory.EXIT).unlink(missing_ok=True)


def open_attempt(
    job: Job, config_toml: str, tables: Mapping[str, Any], world: World, failures: WriteFailures
) -> Attempt:
    """Create the folder of this attempt, write its configuration, and log to it. A collective.

    config_toml: the configuration as TOML, with masked secrets. tables: the configuration.
    Raises StorageError on every rank if rank 0 cannot write.
    """
    run = job.dump_folder

    def make() -> int:
        with storage_error(run):
            attempt = Attempt(run)
            attempt.write_config(config_toml)
            if name := job.save_config_file:
                masked = mask_values(tables)
                (attempt.run / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(attempt.run / name, json.dumps(masked, indent=2))
            attempt.remove_exit()
            return attempt.number

    number = world.step_group.run_on_leader(make)
    attempt = Attempt(run, number, failures=failures)
    if world.rank == 0:
        attempt.capture_environment()
    add_file(run_directory.log_file(attempt.folder, world.rank), failures)
    return attempt


def _make_folder(run: Path) -> int:
    """Make the folder of the next free attempt and return its number."""
    (run / run_directory.ATTEMPTS).mkdir(parents=True, exist_ok=True)
    newest = run_directory.newest_attempt(run)
    number = 1 if newest is None else int(newest.name) + 1
    while True:
        try:
            run_directory.attempt_folder(run, number).mkdir()
            return number
        except FileExistsError:  # another start of the same job was faster
            number += 1


def _end_last_line(path: Path) -> None:
    """Complete the last line with a newline if a killed writer left half of it."""
    if path.exists() and path.stat().st_size > 0:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _remove_unfinished(run: Path, previous: int) -> None:
    """Remove the temporary files of `atomic_file` that a kill of the previous attempt left."""
    attempt = f"{run_directory.ATTEMPTS}/{previous}"
    starts = f"{run_directory.ATTEMPTS}/0"
    for pattern in ("*", f"{attempt}/*", f"{attempt}/*/*", f"{starts}/*/*"):
        for path in run.glob(f"{pattern}.tmp-[0-9]*"):
            if path.is_file():
                path.unlink(missing_ok=True)


# ---- errors of ranks


def _gpu() -> int | None:
    """Return this process's GPU among those it sees; None without a GPU, or after a driver error."""
    import torch

    try:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else None
    except RuntimeError:
        return None


def record_error(
    attempt_folder: Path, rank: int, phase: str, step: int, error: Exception
) -> dict[str, Any]:
    """Write ``errors/rank-<r>.json``, and ``errors/first.json`` if no rank did before. Never raises.

    Returns the record.
    """
    record = {
        "time": time.time(),
        "host": socket.gethostname(),
        "gpu": _gpu(),
        "rank": rank,
        "phase": phase,
        "step": step,
        "traceback": mask_text("".join(traceback.format_exception(error))),
    }
    path = run_directory.error_file(attempt_folder, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record) + "\n")
        with suppress(OSError):  # another rank was faster, or the file system has no hard links
            os.link(path, path.with_name(run_directory.FIRST_ERROR))
    except OSError as problem:
        logger.warning(f"The error that follows could not be recorded: {problem}")
    return record


# ---- environment of an attempt


MAX_DIFF_BYTES = 4 * 1024**2
NOT_RECORDED = "<not recorded>"
# Options that make git's output independent of the user's settings.
AS_A_PATCH = "--no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/".split()

# Variables whose values are recorded, by topic; `*` ends a prefix. A test compares this table with
# docs/guides/security.md.
RECORDED: dict[str, tuple[str, ...]] = {
    "shell and system": (
        "PATH", "PWD", "SHELL", "LANG", "LC_ALL", "TZ", "HOSTNAME", "USER", "LOGNAME", "HOME", "TMPDIR",
        "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    ),
    "Python": (
        "PYTHONPATH", "PYTHONHASHSEED", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT",
        "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "VIRTUAL_ENV", "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
    ),
    "threads and CPU": (
        "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*", "ATEN_CPU_CAPABILITY",
        "DNNL_*", "ONEDNN_*",
    ),
    "torch": ("TORCH_*", "TORCHINDUCTOR_*", "TORCHELASTIC_*", "PYTORCH_*", "TRITON_*", "INDUCTOR_*", "KINETO_*"),
    "GPUs": ("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NVTE_*", "HIP_*", "HSA_*", "ROCM_*", "ROCR_*", "MIOPEN_*"),
    "network": ("NCCL_*", "RCCL_*", "GLOO_*", "TP_SOCKET_IFNAME", "UCX_*", "FI_*", "OFI_*", "SHARP_*"),
    "launcher": (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "NGPU", "NNODES", "NODE_RANK", "RDZV_ID",
        "MAX_RESTARTS", "LOG_RANK", "LOG_PREFIX", "CONFIG_FILE", "NUMA_BINDING",
    ),
    "Slurm": (
        "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
        "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND",
        "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_HINT", "SLURM_LOCALID",
        "SLURM_MEM_PER_NODE", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
        "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_SUBMIT_DIR", "SLURM_TASK_PID",
        "SLURM_TOPOLOGY_ADDR", "SLURMD_NODENAME",
    ),
    "data and logging": (
        "HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS",
        "TIKTOKEN_CACHE_DIR", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_NAME", "WANDB_DIR",
        "NO_COLOR", "XDG_CACHE_HOME",
    ),
}  # fmt: skip


def is_recorded(name: str) -> bool:
    """Return True if the value of the variable `name` is recorded."""
    names = {pattern for patterns in RECORDED.values() for pattern in patterns}
    if name in names:
        return True
    # The name of a secret may start with one of the prefixes.
    return not is_secret_name(name) and any(fnmatchcase(name, pattern) for pattern in names)


def recorded_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the lines of variables.txt: values of listed names, and all other names."""
    return [
        f"{name}={mask_text(variables[name]) if is_recorded(name) else NOT_RECORDED}"
        for name in sorted(variables)
    ]


def write_environment(
    folder: Path, variables: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> None:
    """Write variables.txt, packages.txt, facts.json, and git.txt into `folder`.

    Local changes of the checkout are written to uncommitted.diff. Each file is sorted plain text,
    so that `diff -r` compares two attempts. Only the user can read the files. git may take seconds:
    run this in a thread.
    """
    # Imports the config schema, which most users of this module do not need.
    from torchtitan_like.config.arguments import mask_arguments

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    variables = dict(os.environ) if variables is None else variables
    _write(folder / "variables.txt", recorded_variables(variables))
    names, editables = packages(sys.path)
    _write(folder / "packages.txt", names)
    program, *arguments = sys.argv if argv is None else argv
    facts: dict[str, object] = {
        "argv": [mask_text(program), *mask_arguments(arguments)],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "system": platform.platform(),
        "python": sys.version,
        "cpu": cpu_model(),
        "num_cpus": num_cores(),
        "host_memory_bytes": host_memory_bytes(),
        **numeric_facts(),
    }
    _write(folder / "facts.json", [json.dumps(facts, indent=2)])
    _write_git(folder, [Path(__file__).resolve().parents[1], *editables])


def numeric_facts() -> dict[str, object]:
    """Return the facts that determine results to the last bit: torch, CPU capability, threads, GPUs."""
    import torch

    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        facts["gpus"] = [
            f"{gpu.name}, {gpu.total_memory} bytes, capability {gpu.major}.{gpu.minor}"
            for gpu in gpus
        ]
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = Path("/sys/module/nvidia/version")
        facts["gpu_driver"] = driver.read_text().strip() if driver.exists() else None
    return facts


def packages(paths: Iterable[str]) -> tuple[list[str], list[Path]]:
    """Return the installed packages as sorted `name==version`, and the source folders of editable ones.

    The names of the `.dist-info` folders hold both; the first of a name on the path counts. Their
    metadata is not opened: hundreds of small files are slow on a shared disk.
    """
    versions: dict[str, str] = {}
    editables: list[Path] = []
    for path in dict.fromkeys(paths):
        for entry in sorted(Path(path or ".").glob("*.dist-info")):
            name, _, version = entry.name.removesuffix(".dist-info").partition("-")
            if name in versions:
                continue
            versions[name] = version
            if (source := _editable_source(entry / "direct_url.json")) is not None:
                editables.append(source)
    return sorted(f"{name}=={version}" for name, version in versions.items()), editables


def _editable_source(direct_url: Path) -> Path | None:
    """Return the source folder in an editable package's direct_url.json (PEP 610), or None."""
    try:
        data = json.loads(direct_url.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_editable = data.get("dir_info", {}).get("editable", False)
    if not is_editable or not data["url"].startswith("file://"):
        return None
    return Path(data["url"].removeprefix("file://"))


def git_state(folder: Path) -> tuple[list[str], str] | None:
    """Return facts and the uncommitted diff of the git checkout that tracks files of `folder`, or None."""
    top = git_output(folder, "rev-parse", "--show-toplevel")
    if top is None or not has_tracked_files(folder):
        return None
    commit = (git_output(folder, "rev-parse", "--verify", "HEAD") or "none yet").strip()
    changed = (git_output(folder, "status", "--porcelain") or "").rstrip("\n").splitlines()
    diff = git_output(folder, "diff", "HEAD", "--binary", *AS_A_PATCH) or ""
    if len(diff) > MAX_DIFF_BYTES:
        diff = (
            f"{diff[:MAX_DIFF_BYTES]}\n... {len(diff) - MAX_DIFF_BYTES} more characters left out\n"
        )
    facts = [
        f"checkout {top.strip()}",
        f"commit {commit}",
        f"{len(changed)} changed or untracked files",
        *changed,
    ]
    return facts, mask_text(diff)


def _write_git(folder: Path, sources: Iterable[Path]) -> None:
    lines: list[str] = []
    diffs = ""
    for source in dict.fromkeys(sources):
        state = git_state(source)
        if state is not None and state[0][0] not in lines:
            lines += state[0]
            diffs += state[1]
    commit = recorded_commit()
    built = [f"commit {commit}, recorded when the package was built"] if commit else []
    _write(folder / "git.txt", lines or built or ["the package is in no git checkout"])
    if diffs:
        _write(folder / "uncommitted.diff", [diffs.removesuffix("\n")])


def _write(path: Path, lines: Iterable[str]) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape", opener=_open_private) as file:
        file.write("".join(f"{line}\n" for line in lines))


def _open_private(path: str, flags: int) -> int:
    """Open a file that only the user can read."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # for a file that exists already
    return descriptor
