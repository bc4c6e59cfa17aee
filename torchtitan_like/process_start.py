"""Prepare a process: signals end it with their exit codes, and it ends with its launcher.

This module has no slow imports: signals before its functions are called have Python's behavior.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchtitan_like.util.exit_codes import RANK_SIGNALS, SIGNAL_CODES, ExitCode
from torchtitan_like.util.output import open_closed_streams

if TYPE_CHECKING:
    from torchtitan_like.config.loader import CommandLine

# Environment variable with the process id of the launcher. The process ends when the launcher does.
LAUNCHER = "TORCHTITAN_LIKE_LAUNCHER"
PR_SET_PDEATHSIG = 1
# Settings of torch's allocator. The second name is older; torch reads it if the first is not set.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def exit_on_signals(record: Callable[[ExitCode], None] = lambda code: None) -> None:
    """End the process on a signal of `RANK_SIGNALS`, after calling ``record``.

    Ignored signals remain ignored.
    """

    def end(signum: int, _frame: FrameType | None) -> None:
        code = SIGNAL_CODES[signal.Signals(signum)]
        message = f"Training stopped: {code.reason}, during the imports\n"
        with suppress(OSError):  # a full disk must not change the code
            os.write(2, message.encode())
        with suppress(OSError):
            record(code)
        os._exit(code)

    for signum in RANK_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, end)


def die_with_launcher(signum: signal.Signals) -> None:
    """Let the kernel send ``signum`` to this process when its launcher dies. Only on Linux.

    The kernel watches the thread that started this process. torchrun and bash start ranks in their
    main thread.
    """
    launcher = int(os.environ.pop(LAUNCHER, 0))
    is_launched = launcher > 0 or "TORCHELASTIC_RUN_ID" in os.environ
    if not is_launched or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if launcher > 0 and os.getppid() != launcher:  # it may have died before the line above
        from torchtitan_like.util.locks import is_running  # after the handlers of signals

        if not is_running(launcher):  # the parent process may be a wrapper
            os.kill(os.getpid(), signum)


def has_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Return whether the allocator of a rank on a GPU has expandable segments; by default it has."""
    settings = next((environ[name] for name in ALLOCATOR if name in environ), EXPANDABLE)
    return EXPANDABLE in settings.replace(" ", "")


def begin_rank(argv: list[str]) -> CommandLine:
    """Prepare streams and signals of a rank, and remove exit.json of an earlier attempt.

    Returns the command line. Its files are read here, and not again; or the launcher has read them.

    Python's garbage collector is disabled until `GarbageCollection` configures it. During imports
    it would visit all modules repeatedly and free almost no memory.

    Threads of OpenMP sleep while they wait, unless OMP_WAIT_POLICY says otherwise. By default they
    spin, which takes the cores from other processes: on two busy cores, the debug model was 2 to 7
    times slower. On two idle cores, both were equally fast within the noise (2026-11-27).
    """
    gc.disable()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # libgomp reads it when torch is imported
    if NVIDIA_DRIVER.exists() and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE
    open_closed_streams()
    exit_on_signals()
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    die_with_launcher(signal.SIGKILL if is_under_torchrun else signal.SIGTERM)
    from torchtitan_like.config.arguments import wants_help
    from torchtitan_like.config.handover import take_command_line

    command_line = take_command_line(argv)
    if os.environ.get("RANK", "0") == "0" and not wants_help(argv):
        _clear_exit(command_line)
    return command_line


def _clear_exit(command_line: CommandLine) -> None:
    """Remove exit.json of an earlier attempt. From here on, a signal writes a new one."""
    from torchtitan_like.config import ConfigError
    from torchtitan_like.config.loader import CUSTOM_IMPORT_KEY
    from torchtitan_like.util.locks import run_lock
    from torchtitan_like.util.run_directory import EXIT, RunEnd, write_exit

    try:
        config = command_line.load()
    except ConfigError as error:  # reported by the check of the configuration
        # User code is not imported yet, so the names and sections that it registers are unknown.
        errors = [problem for problem in error.problems if problem.severity != "warning"]
        is_known_later = all(CUSTOM_IMPORT_KEY in problem.involves for problem in errors)
        if error.partial is None or not is_known_later:
            return
        config = error.partial
    folder = Path(config.job.dump_folder)
    if run_lock(folder / config.checkpoint.folder).local_holder() is not None:
        return  # exit.json belongs to that run
    with suppress(OSError):
        (folder / EXIT).unlink(missing_ok=True)
    exit_on_signals(lambda code: write_exit(folder, RunEnd(code.reason, int(code), None)))
