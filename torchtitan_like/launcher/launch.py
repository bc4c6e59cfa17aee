"""Start the ranks of a run on this machine, pass signals on to them, and report how they ended."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchtitan_like.launcher.local_devices import Machine, inspect_machine
from torchtitan_like.launcher.options import (
    AUTO,
    OPTIONS,
    Launch,
    LaunchError,
    read_options,
    torchrun_arguments,
)
from torchtitan_like.process_start import LAUNCHER
from torchtitan_like.util.exit_codes import (
    LAUNCHER_SIGNALS,
    SIGNAL_CODES,
    ExitCode,
    signal_for_ranks,
)
from torchtitan_like.util.output import flush_or_discard, show, show_error
from torchtitan_like.util.run_directory import LAUNCHER_FOLDER

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig

PACKAGE = "torchtitan_like"
ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package
# Environment variables. TYPED: the whole command, if another script started this program.
TYPED = "TYPED"
# Environment variables that run_train.sh sets. PROGRAM: the first word of the user's command.
# PYTHON: the Python of the ranks, which may be a wrapper.
PROGRAM = "TITAN_PROGRAM"
PYTHON = "TITAN_PYTHON"
# Variables of other launchers, which the ranks must not inherit.
OTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# torchrun kills ranks 30 s after a signal; a last checkpoint may take longer.
SHUTDOWN_SECONDS = "1800"


class StoppedBeforeStart(BaseException):
    """A signal before the run starts. No handler of errors, such as of user code, may catch it."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__()
        self.code = code


class SignalRelay:
    """Passes signals on to the run, which saves a checkpoint and ends.

    Before the run starts, a signal raises StoppedBeforeStart. The run has a separate process group,
    so that it receives a Ctrl-C only once, from this process.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.passed_on: signal.Signals | None = None
        self.is_starting = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle `LAUNCHER_SIGNALS`, except ignored ones. Ignore all of them afterwards."""
        for signum in LAUNCHER_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)
        try:
            yield
        finally:
            self.ignore()

    def start_and_wait(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Start the command and wait for its end.

        Returns its exit code as a shell reports it: 128 + N after signal N.
        """
        self.is_starting = True
        # The kernel ends the run when the thread that started it ends: it is the main thread.
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, preexec_fn=os.setpgrp
        )
        if self.passed_on is not None:  # the signal came while the process was being started
            self._send(self.passed_on)
        code = self.process.wait()
        self.ignore()
        return code if code >= 0 else 128 - code

    def ignore(self) -> None:
        """Ignore further signals."""
        for signum in LAUNCHER_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if not self.is_starting:
            raise StoppedBeforeStart(SIGNAL_CODES[signal.Signals(signum)])
        self.passed_on = passed_on = signal_for_ranks(signum)
        show_error(f"Passing {passed_on.name} on to the run, which saves a checkpoint and ends.")
        self._send(passed_on)

    def _send(self, signum: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)


def launch(options: Mapping[str, str | None], settings: Sequence[str], words: Sequence[str]) -> int:
    """Check the configuration, start the ranks, wait for their end. Returns the exit code.

    options: options of the command line by `Option.key`.
    settings: --section.key value, as the ranks receive them.
    words: the arguments that the user typed.
    """
    relay = SignalRelay()
    with relay.listening():
        try:
            return _check_and_start(relay, options, settings, words)
        except LaunchError as error:
            show_error(str(error))
            return error.code
        except StoppedBeforeStart as stopped:
            show_error("Stopped: nothing was started.")
            return int(stopped.code)
        finally:
            flush_or_discard(sys.stdout)
            flush_or_discard(sys.stderr)


def _check_and_start(
    relay: SignalRelay,
    options: Mapping[str, str | None],
    settings: Sequence[str],
    words: Sequence[str],
) -> int:
    from torchtitan_like.config.arguments import mask_arguments
    from torchtitan_like.launcher.finished_run import show_results
    from torchtitan_like.launcher.outcome import Start, prepare_run_folder, report_end

    since = float(int(time.time()))
    environ = dict(os.environ)
    python = environ.get(PYTHON, sys.executable)
    command_typed = typed_command(environ, words)
    machine = inspect_machine(environ)
    if machine.gpu_list:
        show(f"{machine.host}: {', '.join(machine.gpu_list)}")
    plan = read_options(options, environ, machine)
    environ = child_environment(environ, plan, machine)
    config, for_ranks = load_for_ranks(plan, machine, settings)
    folder = prepare_run_folder(config, plan.max_nodes)
    if plan.nccl_debug_to:
        Path(plan.nccl_debug_to).mkdir(parents=True, exist_ok=True)
    start = Start(since, plan.max_nodes, command_typed, titan_words())
    command = command_of_ranks(python, plan, folder)
    shown = shlex.join([*command, *mask_arguments(settings)])  # settings may be secret
    show(f"+ OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} {shown}")
    with _launcher_folder() as launcher_folder:
        if launcher_folder is not None:
            for_ranks[LAUNCHER_FOLDER] = str(launcher_folder)
        code = relay.start_and_wait([*command, *settings], environ | for_ranks)
        code = report_end(config, code, relay.passed_on, start, launcher_folder)
    is_done = code == ExitCode.DONE and plan.max_nodes == 1
    if config.job.show_results and is_done and "SLURM_JOB_ID" not in environ:
        show_results(config, python, environ)
    return code


@contextmanager
def _launcher_folder() -> Iterator[Path | None]:
    """Yield a temporary folder for the exit.json of a run whose folder cannot be written.

    `write_exit` creates it, so that a kill leaves none. Yields None if there is no place for it.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"titan-{uuid.uuid4().hex}"
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_for_ranks(
    plan: Launch, machine: Machine, settings: Sequence[str]
) -> tuple[JobConfig, dict[str, str]]:
    """Load the configuration, and check this machine's files and each number of machines.

    Returns the configuration, and the variables that hand it to the ranks. Raises LaunchError with
    all problems and the code BAD_CONFIG.
    """
    from torchtitan_like.check import check_loaded, in_command, load_with_files
    from torchtitan_like.config import ConfigError, handover
    from torchtitan_like.config.problems import report

    shown = None
    try:
        with in_command():
            loaded = load_with_files(settings, training=True)
            for nodes in range(plan.min_nodes, plan.max_nodes + 1):
                _, warnings = check_loaded(
                    loaded,
                    plan.num_ranks * nodes,
                    training=True,
                    device_type=None if machine.num_gpus else "cpu",
                )
                if warnings and report(warnings) != shown:
                    shown = report(warnings)
                    show_error(shown)
    except ConfigError as error:
        raise LaunchError(str(error), ExitCode.BAD_CONFIG) from error
    return loaded.config, handover.encode(loaded.config, loaded.problems)


def command_of_ranks(python: str, plan: Launch, folder: Path) -> list[str]:
    """Return the command that starts the ranks, without settings. ``folder``: the run folder."""
    program = ["-m", f"{PACKAGE}.train"]
    if not plan.uses_torchrun:
        return [python, *program]
    arguments = torchrun_arguments(plan, folder / "torchrun")
    return [python, "-m", f"{PACKAGE}.torchrun", *arguments, *program]


def child_environment(environ: Mapping[str, str], plan: Launch, machine: Machine) -> dict[str, str]:
    """Return the environment of the ranks."""
    dropped = (*OTHER_LAUNCHERS, TYPED, PROGRAM, PYTHON)
    child = {name: value for name, value in environ.items() if name not in dropped}
    # Use this package, even if the current folder has a copy, which Python 3.10 searches first.
    paths = dict.fromkeys(
        [str(ROOT), os.getcwd(), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    child |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),  # the run saves and ends when this process is killed
    }
    child.setdefault("OMP_NUM_THREADS", str(max(machine.num_cores // plan.num_ranks, 1)))
    child.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    if plan.nccl_debug_to:
        child.setdefault("NCCL_DEBUG", "INFO")
        child["NCCL_DEBUG_FILE"] = f"{plan.nccl_debug_to}/nccl-%h-%p.log"  # %h: host, %p: process
    return child


def typed_command(environ: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the command that starts this run again, with the environment variables that matter."""
    if typed := environ.get(TYPED):
        return typed
    of_several = {"NNODES", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID", "NODE_RANK"}
    names = (
        [option.variable for option in OPTIONS if option.variable in of_several]
        if environ.get("NNODES")
        else []
    )
    # run_train.sh sets NGPU=auto if the user has not set it.
    names = [
        *(["NGPU"] if environ.get("NGPU") != AUTO else []),
        *names,
        "MAX_RESTARTS",
        "CONFIG_FILE",
    ]
    variables = [f"{name}={shlex.quote(environ[name])}" for name in names if environ.get(name)]
    program = environ.get(PROGRAM)
    start = [program] if program else [*titan_words(), "train"]
    return " ".join([*variables, shlex.join([*start, *words])])


def titan_words() -> list[str]:
    """Return the words that start the `titan` command of this installation."""
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        path = [] if ROOT == Path.cwd() else [f"PYTHONPATH={os.path.relpath(ROOT)}"]
        inside = sys.executable.startswith(f"{ROOT}{os.sep}")
        return [*path, os.path.relpath(sys.executable) if inside else sys.executable, "-m", PACKAGE]
    executable = Path(sys.executable).with_name("titan")
    if shutil.which("titan") == str(executable):
        return ["titan"]
    return [str(executable)] if executable.exists() else [sys.executable, "-m", PACKAGE]
