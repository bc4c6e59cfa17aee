"""The run folder before and after a run: remove an old exit.json, report how the run ended."""

from __future__ import annotations

import re
import shlex
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.checkpoint.step_folders import StepFolder, published_steps
from torchtitan_like.launcher.options import LaunchError
from torchtitan_like.report.state import find_state, ranks_without_error
from torchtitan_like.util.exit_codes import (
    CRASH,
    KILLED,
    RANK_SIGNALS,
    REPEATABLE,
    SIGNAL_CODES,
    ExitCode,
    RunFailure,
)
from torchtitan_like.util.files import describe_os_error
from torchtitan_like.util.locks import run_lock
from torchtitan_like.util.output import show, show_error
from torchtitan_like.util.run_directory import (
    ATTEMPTS,
    EXIT,
    RunEnd,
    attempt_folder,
    describe_error,
    earliest_error,
    heartbeat_file,
    newest_attempt,
    numbered_attempts,
    ranks_with_errors,
    read_exit,
    write_exit,
)

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig

PEER_LOST = r"gloo/|NCCL|ncclInternal|[Cc]onnection (closed|reset)|Timed out waiting"


class FirstError(NamedTuple):
    """The earliest error record of an attempt."""

    attempt: Path
    record: dict[str, Any]


class Start(NamedTuple):
    """How a run was started."""

    since: float  # seconds since 1970
    num_nodes: int
    command: str  # what a person types to start it again
    titan: list[str]  # words that start the `titan` command


def prepare_run_folder(config: JobConfig, num_nodes: int) -> Path:
    """Remove the exit.json of an earlier attempt. Returns the run folder.

    Raises LaunchError if the folder cannot be written, or if a run on this machine is using it.
    With several machines, this one may be about to join that run: then exit.json is kept.
    """
    folder = Path(config.job.dump_folder)
    refusal = run_lock(folder / config.checkpoint.folder).local_holder()
    if refusal is not None and num_nodes == 1:
        raise LaunchError(str(refusal), ExitCode.STORAGE)
    try:
        if refusal is None:
            (folder / EXIT).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
    except OSError as error:
        raise LaunchError(
            f"Nothing was started: the run folder {folder} cannot be written: "
            f"{describe_os_error(error)} Then start again, or choose another job.dump_folder",
            ExitCode.STORAGE,
        ) from error
    return folder


def report_end(
    config: JobConfig,
    code: int,
    passed_on: signal.Signals | None,
    start: Start,
    launcher_folder: Path | None = None,
) -> int:
    """Print the end of a run that returned ``code``. Returns the exit code of the launcher.

    After an end that all ranks agree on, torchrun returns 0, and after signal N 128 + N. The exit
    code is then in the exit.json of this attempt. A single rank without torchrun returns it
    directly.
    """
    folder = Path(config.job.dump_folder)
    exit_folder = folder
    # If its folder cannot be written, a run writes exit.json into the folder of its launcher.
    if launcher_folder is not None and (launcher_folder / EXIT).exists():
        exit_folder = launcher_folder
    if passed_on is None and code - 128 in RANK_SIGNALS:  # torchrun itself got the signal
        passed_on = signal.Signals(code - 128)
    stop = None if passed_on is None else SIGNAL_CODES[passed_on]
    end = None
    try:
        end = read_exit(exit_folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problem = describe_os_error(error) if isinstance(error, OSError) else str(error)
        show_error(f"{problem} Look for the end of the run in the logs below {folder / ATTEMPTS}.")
        return CRASH
    # Torchrun may be killed after the ranks have agreed on their end.
    is_agreed = code == 0 or stop is not None or (code == KILLED and end and end.step is not None)
    if end is not None and (is_agreed or code == end.code):
        return _report_agreed(config, end, start)
    if code == 0:
        if start.num_nodes > 1:
            return _code_without_exit(folder, start.since)
        show_error(
            f"The run ended with code 0, but did not write {exit_folder / EXIT}. Expected the "
            f"file at the end of every run. Read the logs below {folder / ATTEMPTS}."
        )
        return CRASH
    early = ExitCode(code) if code in SIGNAL_CODES.values() else stop
    if early is not None and not _has_started(folder, start.since):
        return _report_agreed(config, _write_exit(folder, early), start)
    if code == ExitCode.BAD_CONFIG:
        return _report_refusal(folder, _first_error(folder, start.since))
    if code == ExitCode.STORAGE:  # another run is using the folder, as a rank has printed
        return code
    return report_crash(config, code, start)


def _code_without_exit(folder: Path, since: float) -> int:
    """Return the code of a run on several machines that ended by agreement, without an exit.json.

    Rank 0 may have written the file into a folder that is not visible here. If the folder of rank 0
    is visible, another machine has started again and removed the file.
    """
    newest = newest_attempt(folder)
    if newest is None or not _has_started(folder, since) or not heartbeat_file(newest, 0).exists():
        return int(ExitCode.DONE)
    show_error(
        f"The run ended, and another machine has removed {folder / EXIT} to start again. Expected "
        "all machines to start again: start this one too."
    )
    return int(ExitCode.REQUEUE)


def _write_exit(folder: Path, code: ExitCode, step: int | None = None) -> RunEnd:
    """Write exit.json. A full disk does not change what the launcher prints and returns."""
    end = RunEnd(code.reason, int(code), step)
    try:
        write_exit(folder, end)
    except OSError as error:
        show_error(f"Cannot write {folder / EXIT}: {describe_os_error(error)}")
    return end


def _has_started(folder: Path, since: float) -> bool:
    """Return True if ranks have created an attempt folder or an error record since then."""
    newest = newest_attempt(folder)
    is_new = newest is not None and newest.stat().st_mtime >= since
    return is_new or _first_error(folder, since) is not None


def _report_agreed(config: JobConfig, end: RunEnd, start: Start) -> int:
    folder = Path(config.job.dump_folder)
    if end.code == ExitCode.DONE:
        show("\n".join(summary(config, folder, start, int(end.step or 0))))
    else:
        _show_how_to_continue(config, end.code, start)
        show_error(f"stopped: {end}; logs: {folder}/{ATTEMPTS}")
    return end.code


def _show_how_to_continue(config: JobConfig, code: int, start: Start) -> None:
    """Print the command, if the same one continues a run that was stopped."""
    folder, checkpoint = Path(config.job.dump_folder), config.checkpoint
    if code not in REPEATABLE or not checkpoint.enable:
        return
    with suppress(OSError, RunFailure):  # of a disk that fails
        full = [step for step in published_steps(folder / checkpoint.folder) if step.is_full]
        if full and not (folder / config.resilience.kill_switch_path).exists():
            show_error(f"Resume at step {full[-1].step} (the same command): {start.command}")


def _report_refusal(folder: Path, first: FirstError | None) -> int:
    _write_exit(folder, ExitCode.BAD_CONFIG)
    reason = "its message is above" if first is None else describe_error(first.record)
    show_error(f"Nothing was started: a rank rejected the configuration (code 78): {reason}")
    return int(ExitCode.BAD_CONFIG)


def report_crash(config: JobConfig, code: int, start: Start) -> int:
    """Print the first error of a run, and the ranks without an error. Returns the exit code.

    The code is BAD_CONFIG if a rank rejected the configuration, and BAD_DATA if a rank read damaged
    data. It is LOST_PEER if all recorded errors are lost connections to other ranks. exit.json then
    has this code.
    """
    folder = Path(config.job.dump_folder)
    # A rank that was stopped because another one crashed may have written exit.json.
    with suppress(OSError, ValueError):
        if read_exit(folder).step is None:
            (folder / EXIT).unlink()
    first = _first_error(folder, start.since)
    if first is None:
        line = "stopped: killed, or its error is above and could not be written"
        if code == KILLED:
            code = ExitCode.LOST_PEER
            _write_exit(folder, ExitCode.LOST_PEER)
            line = find_state(folder, time.time()).line
        _show_how_to_continue(config, code, start)
        show_error(f"{line}: no rank has recorded an error in {folder / ATTEMPTS}")
        return int(code)
    attempt, record = first
    if record["phase"] == "config":
        return _report_refusal(folder, first)
    has_lost_peer = (
        bool(ranks_without_error(attempt)) and re.search(PEER_LOST, record["traceback"]) is not None
    )
    if record["phase"] == "data":  # one rank read damaged data, the others lost it
        code = ExitCode.BAD_DATA
        _write_exit(folder, ExitCode.BAD_DATA, record["step"])
    elif has_lost_peer:
        code = ExitCode.LOST_PEER
        _write_exit(folder, ExitCode.LOST_PEER, record["step"])
    _show_how_to_continue(config, code, start)
    num_errors = len(ranks_with_errors(attempt))
    lines = [f"FIRST ERROR of {num_errors} (all: {attempt}/errors): {describe_error(record)}"]
    # The state names the ranks without an error, which are the cause if a connection was lost.
    lines.insert(len(lines) if has_lost_peer else 0, find_state(folder, time.time()).line)
    show_error("\n".join(lines))
    return int(code)


def _first_error(folder: Path, since: float) -> FirstError | None:
    """Return the first error of the newest attempt with errors since then.

    Every node calls this.
    """
    newest = next(
        (each for each in reversed(numbered_attempts(folder)) if ranks_with_errors(each)), None
    )
    attempts = [attempt for attempt in (newest, attempt_folder(folder, 0)) if attempt is not None]
    errors = [
        FirstError(attempt, record)
        for attempt in attempts
        if (record := earliest_error(attempt, since)) is not None
    ]
    return max(errors, key=lambda first: float(first.record["time"]), default=None)


def summary(config: JobConfig, folder: Path, start: Start, last_step: int) -> list[str]:
    """Return three lines: paths of the results, and commands to resume and to generate a sample."""
    metrics = config.metrics
    checkpoint = config.checkpoint
    command = start.command
    if checkpoint.load_step >= 0:  # with more steps, the run would go back again
        command = with_option(command, "checkpoint.load_step", -1)
    # If checkpointing is disabled, an earlier run wrote the steps in the folder.
    steps = published_steps(folder / checkpoint.folder) if checkpoint.enable else []
    newest = str(steps[-1].path) if steps else "none (checkpoint.enable is off)"
    board = f"tensorboard --logdir {shlex.quote(str(folder / metrics.save_tb_folder))}"
    if not metrics.enable_tensorboard:
        board = "off (metrics.enable_tensorboard)"
    sample = " ".join(map(quoted, [*start.titan, "generate", newest, "--prompt", "The"]))
    return [
        f"Logs: {folder}/{ATTEMPTS}, {folder}/metrics.jsonl | Checkpoint: {newest} | "
        f"TensorBoard: {board}",
        how_to_resume(steps, command, config.training.steps, last_step),
        f"Sample: {sample if steps else 'needs a checkpoint'}",
    ]


def how_to_resume(steps: list[StepFolder], command: str, planned: int, last_step: int) -> str:
    """Return the line for a run of ``planned`` steps that ended at ``last_step``."""
    full = [step for step in steps if step.is_full]
    if not steps:
        return "Resume: needs a checkpoint: --checkpoint.enable"
    if not full:
        return (
            "Resume: not possible from weights only; a new run can start from them: "
            f"--checkpoint.initial_load_path {shlex.quote(str(steps[-1].path))} and a new "
            "--job.dump_folder. Next time: --checkpoint.last_save_model_only=false"
        )
    if steps[-1].step == last_step < planned:
        return f"Resume (all data is read; allow more epochs: max_epochs of the source): {command}"
    change = "the same command, more steps"
    if full[-1].step < last_step:
        change += f"; from step {full[-1].step}, because the last checkpoint has only the weights"
    return f"Resume ({change}): {with_option(command, 'training.steps', 2 * planned)}"


def with_option(command: str, key: str, value: int) -> str:
    """Return the command with the setting ``key`` = ``value``, instead of its earlier values."""
    words: list[str] = []
    is_value = False
    for word in shlex.split(command):
        name, has_value, _ = word.partition("=")
        if name.replace("-", "_") == f"__{key}":
            is_value = not has_value
        elif is_value:
            is_value = False
        else:
            words.append(word)
    return " ".join([*map(quoted, words), f"--{key}", str(value)])


def quoted(word: str) -> str:
    """Quote a word for a shell. For an assignment (NAME=value), quote only the value."""
    name, is_assignment, value = word.partition("=")
    return (
        f"{name}={shlex.quote(value)}"
        if is_assignment and name.isidentifier()
        else shlex.quote(word)
    )
