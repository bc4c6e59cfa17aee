"""What run_train.sh does in a run's folder before and after the run. The resolved config comes on standard input.

python scripts/run_folder.py clear NUM_MACHINES
    removes the exit.json of an earlier attempt and prints the run's folder. Exits with 74 if a run on one machine finds
    another one that is alive (of several machines, this one may be about to join it), or if the folder cannot be written
python scripts/run_folder.py end CODE SIGNAL SINCE NUM_MACHINES COMMAND FOLDER
    of a run that has ended with CODE: prints how it ended, and exits with the code of run_train.sh. SIGNAL: the one that was
    passed on (INT, TERM, or empty); SINCE: its start, in seconds since 1970; COMMAND: what was typed, in FOLDER
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import signal
import sys
import tempfile
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_like.checkpoint.lock import RunLock
from torchtitan_like.checkpoint.step_folders import StepFolder, published_steps
from torchtitan_like.process_start import CODES
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.run_directory import (
    EXIT,
    LAUNCHER_FOLDER,
    RunEnd,
    describe_error,
    read_errors,
    read_first_error,
    write_exit,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CRASH = 1
PEER_LOST = r"gloo/|NCCL|ncclInternal|[Cc]onnection (closed|reset)|Timed out waiting"
ROOT = Path(__file__).resolve().parent.parent
# An attempt's folder, the first error in it, and the ranks that have left one.
Found = tuple[Path, dict[str, Any], set[int]]


class Typed(NamedTuple):
    """What a person would type to run this again, and where."""

    command: str
    folder: Path


def clear(config: dict[str, Any], num_machines: int) -> int:
    """Remove the exit.json of an earlier attempt, unless it belongs to a run that is alive."""
    folder = Path(config["job"]["dump_folder"])
    refusal = RunLock(folder / config["checkpoint"]["folder"]).holder_here()
    if refusal is not None and num_machines == 1:
        print(refusal, file=sys.stderr)
        return int(ExitCode.STORAGE)
    try:
        if refusal is None:
            (folder / EXIT).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
    except OSError as error:
        print(
            f"Nothing was started: the run folder {folder} cannot be written: {error}. Free space, repair the disk or "
            "choose another job.dump_folder",
            file=sys.stderr,
        )
        return int(ExitCode.STORAGE)
    print(folder)
    return 0


def leave_exit(folder: Path, code: ExitCode, step: int | None) -> None:
    """Write exit.json. A full disk does not change what this script prints and returns."""
    try:
        write_exit(folder, RunEnd(code.reason, int(code), step))
    except OSError as error:
        print(f"Cannot write {folder / EXIT}: {error}", file=sys.stderr)


def end(config: dict[str, Any], code: int, passed_on: str, since: float, num_machines: int, typed: Typed) -> int:
    """Print how the run has ended. Return the code for it.

    torchrun returns 0 for every end that all ranks agree on, and 1 after a signal: exit.json, which this attempt has
    written, has the code. One rank without torchrun returns that code, or has crashed after it wrote the file.
    """
    folder = Path(config["job"]["dump_folder"])
    exit_file = folder / EXIT
    # A run whose folder cannot be written leaves the file in the folder of its launcher.
    if launcher := os.environ.get(LAUNCHER_FOLDER):
        exit_file = next(Path(launcher).glob(EXIT), exit_file)
    stop = CODES[signal.Signals[f"SIG{passed_on}"]] if passed_on else None
    try:
        written = read_json(exit_file)
        outcome = int(written["code"]), str(written["reason"]), written["step"]
    except FileNotFoundError:
        outcome = None
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{exit_file} does not say how the run has ended: {error}", file=sys.stderr)
        return CRASH
    if outcome is not None and (code == 0 or stop is not None or code == outcome[0]):
        return report(config, *outcome, typed)
    if code == 0:
        if num_machines > 1:  # rank 0 has written the file in a folder that this machine does not see
            return 0
        print(f"The run has ended with code 0, but has left no {exit_file}", file=sys.stderr)
        return CRASH
    early = ExitCode(code) if code in CODES.values() else stop
    if early is not None and not has_begun(folder / "attempts", since):
        leave_exit(folder, early, None)
        return report(config, early, early.reason, None, typed)
    if code == ExitCode.BAD_CONFIG:
        return report_refusal(folder, first_since(folder / "attempts", since))
    if code == ExitCode.STORAGE:  # another run is alive here, as a rank has printed; that run's files stay
        return code
    return report_crash(folder, code, since)


def has_begun(attempts: Path, since: float) -> bool:
    """Return True if ranks have come so far since then that they have a folder, or have left an error."""
    newest = max((int(path.name) for path in attempts.glob("[1-9]*")), default=0)
    is_new = newest > 0 and (attempts / str(newest)).stat().st_mtime >= since
    return is_new or first_since(attempts, since) is not None


def report(config: dict[str, Any], code: int, reason: str, step: int | None, typed: Typed) -> int:
    """Print how the run ended; returns ``code``."""
    folder = Path(config["job"]["dump_folder"])
    if code == ExitCode.DONE:
        print("\n".join(last_words(config, folder, typed, int(step or 0))))
    else:
        where = "before the first step" if step is None else f"at step {step}"
        print(f"Stopped {where}: {reason} (code {code}); logs: {folder}/attempts", file=sys.stderr)
    return code


def report_refusal(folder: Path, found: Found | None) -> int:
    """Print that a rank has refused the config, and why if it has left a record. Return the code for it."""
    leave_exit(folder, ExitCode.BAD_CONFIG, None)
    reason = "its message is above" if found is None else describe_error(found[1])
    print(f"Nothing was started: a rank has refused the configuration (code 78): {reason}", file=sys.stderr)
    return int(ExitCode.BAD_CONFIG)


def report_crash(folder: Path, code: int, since: float) -> int:
    """Print the first error since then, and which ranks have left none. Return the code for it.

    It is BAD_CONFIG if a rank has refused the config, BAD_DATA if one has read damaged data, and
    LOST_PEER if ranks have left nothing but errors of others that
    were lost. exit.json then has that code too.
    """
    attempts = folder / "attempts"
    with suppress(OSError, ValueError, KeyError):  # of a rank that was asked to stop because another had crashed
        if read_json(folder / "exit.json")["step"] is None:
            (folder / "exit.json").unlink()
    found = first_since(attempts, since)
    if found is None:
        where = f"in {attempts}: it was killed, or its error stands above and could not be written"
        print(f"The run has crashed, and no rank has left an error {where}", file=sys.stderr)
        return code
    attempt, first, ranks = found
    if first["phase"] == "config":
        return report_refusal(folder, found)
    words = [f"FIRST ERROR of {len(ranks)} (all: {attempt}/errors): {describe_error(first)}"]
    seen = {int(path.stem.removeprefix("rank-")) for path in attempt.glob("heartbeat/rank-*.json")}
    silent = seen - ranks
    if silent:
        shown = ", ".join(map(str, sorted(silent)[:32])) + f" and {len(silent) - 32} more" * (len(silent) > 32)
        silence = f"NO ERROR of rank {shown}: killed (for its memory? see dmesg), or it hung and was killed at the end"
        is_consequence = re.search(PEER_LOST, first["traceback"]) is not None
        words.insert(len(words) if is_consequence else 0, silence)
        if is_consequence:
            code = ExitCode.LOST_PEER
            leave_exit(folder, ExitCode.LOST_PEER, first["step"])
    if first["phase"] == "data":  # one rank has read damaged data, and the others have lost it
        code = ExitCode.BAD_DATA
        leave_exit(folder, ExitCode.BAD_DATA, first["step"])
    print("\n".join(words), file=sys.stderr)
    return int(code)


def first_since(attempts: Path, since: float) -> Found | None:
    """Of the newest start that has left errors since then: its folder, the first of them, and which ranks have left one.

    Every node asks, and of thousands of ranks there are thousands of records: of a start that came far enough to have a
    number, only the first is read.
    """
    found = []
    for folder in sorted(attempts.glob("[1-9]*"), key=lambda folder: int(folder.name), reverse=True):
        first = read_first_error(folder) or min(read_errors(folder), key=itemgetter("time"), default=None)
        if first is not None:
            ranks = {int(path.stem.removeprefix("rank-")) for path in folder.glob("errors/rank-*.json")}
            found += [(folder, first, ranks)] if first["time"] >= since else []
            break
    early = [record for record in read_errors(attempts / "0") if record["time"] >= since]
    if early:
        found.append((attempts / "0", min(early, key=itemgetter("time")), {record["rank"] for record in early}))
    return max(found, key=lambda one: one[1]["time"], default=None)


def last_words(config: dict[str, Any], folder: Path, typed: Typed, last_step: int) -> list[str]:
    """Three lines: where everything is, how to resume, how to generate a sample."""
    metrics, elsewhere = config["metrics"], Path.cwd() != typed.folder.resolve()
    command = typed.command
    folder = folder.absolute() if elsewhere else folder
    checkpoint = config["checkpoint"]  # switched off, what lies there is an older run's
    if checkpoint.get("load_step", -1) >= 0:  # with more steps it is another command, and would go back once more
        command = with_option(command, "checkpoint.load_step", -1)
    steps = published_steps(folder / checkpoint["folder"]) if checkpoint["enable"] else []
    newest = str(steps[-1].path) if steps else "none (checkpoint.enable is off)"
    board = f"tensorboard --logdir {shlex.quote(str(folder / metrics['save_tb_folder']))}"
    if not metrics["enable_tensorboard"]:
        board = "off (metrics.enable_tensorboard)"
    script = os.path.relpath(ROOT / "scripts" / "generate.py")
    sample = shlex.join([*python(), script, newest, "--prompt", "ROMEO:"])
    if elsewhere:  # the run's config names files relative to the folder it ran in
        sample = f"cd {shlex.quote(str(Path.cwd()))} && {sample}"
    return [
        f"Logs: {folder}/attempts, {folder}/metrics.jsonl | Checkpoint: {newest} | TensorBoard: {board}",
        how_to_resume(steps, command, int(config["training"]["steps"]), last_step),
        f"Sample: {sample if steps else 'needs a checkpoint'}",
    ]


def how_to_resume(steps: list[StepFolder], command: str, wanted: int, last_step: int) -> str:
    """The line for a run that was to make ``wanted`` steps and has made ``last_step``."""
    full = [step for step in steps if step.is_full]
    if not steps:
        return "Resume: needs a checkpoint: --checkpoint.enable"
    if not full:
        return (
            "Resume: not from weights alone; a new run can begin with them: --checkpoint.initial_load_path "
            f"{shlex.quote(str(steps[-1].path))} and a new --job.dump_folder. "
            "Next time: --checkpoint.last_save_model_only=false"
        )
    if steps[-1].step == last_step < wanted:
        return f"Resume (all data is read; allow more epochs: max_epochs of the source): {command}"
    what = "the same command, more steps"
    if full[-1].step < last_step:
        what += f"; from step {full[-1].step}, as the last save holds the weights alone"
    return f"Resume ({what}): {with_option(command, 'training.steps', 2 * wanted)}"


def with_option(command: str, key: str, value: int) -> str:
    """Return the command with the option ``key`` set to ``value``, in place of every value that it has there."""
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
    """Quote a word for a shell. An assignment before a command (NAME=value) must not be quoted as a whole."""
    name, is_assignment, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if is_assignment and name.isidentifier() else shlex.quote(word)


def python() -> list[str]:
    """How a person starts the Python that runs this, with our package within its reach."""
    inside = sys.executable.startswith(f"{ROOT}{os.sep}")
    executable = os.path.relpath(sys.executable) if inside else sys.executable
    try:
        importlib.metadata.distribution("torchtitan_like")
    except importlib.metadata.PackageNotFoundError:
        return [f"PYTHONPATH={os.path.relpath(ROOT)}", executable]
    return [executable]


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    config = tomllib.loads(sys.stdin.read())
    match arguments:
        case ["clear", num_machines]:
            return clear(config, int(num_machines))
        case ["end", code, passed_on, since, num_machines, command, typed_in]:
            typed = Typed(command, Path(typed_in))
            return end(config, int(code), passed_on, float(since), int(num_machines), typed)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
