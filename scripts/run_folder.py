"""What run_train.sh does in a run's folder before and after torchrun. The resolved config comes on standard input.

python scripts/run_folder.py clear
    removes the exit.json of an earlier attempt; prints the run's folder
python scripts/run_folder.py report COMMAND FOLDER
    exits with the code in exit.json. After a finished run it prints where things are, how to resume (COMMAND: what was
    typed, in FOLDER) and how to sample
python scripts/run_folder.py errors SINCE
    of a run that crashed: prints the first error of those left since then (in seconds since 1970), as its last words. Exits
    with 69, and leaves an exit.json that says so, when all that is left are errors of ranks that have lost another; with 78
    when a rank has refused the config; else with 0
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import sys
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.step_folders import StepFolder, published_steps
from torchtitan_like.monitor.errors import errors_of, first_error, in_words
from torchtitan_like.monitor.run_directory import write_exit
from torchtitan_like.resilience.exit_codes import ExitCode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NO_EXIT_FILE = 1
PEER_LOST = r"gloo/|NCCL|ncclInternal|[Cc]onnection (closed|reset)|Timed out waiting"
ROOT = Path(__file__).resolve().parent.parent


def clear(config: dict[str, Any]) -> int:
    """An old exit.json must not be taken for the outcome of the run that starts now."""
    folder = Path(config["job"]["dump_folder"])
    (folder / "exit.json").unlink(missing_ok=True)
    print(folder)
    return 0


def report(config: dict[str, Any], command: str, typed_in: Path) -> int:
    """Print how the run ended; the code to return for it."""
    folder = Path(config["job"]["dump_folder"])
    try:
        end = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
        code, reason, step = int(end["code"]), end["reason"], end["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder / 'exit.json'} does not say how the run has ended: {error}", file=sys.stderr)
        return NO_EXIT_FILE
    if code == ExitCode.DONE:
        print("\n".join(last_words(config, folder, command, typed_in, step)))
    else:
        where = "before the first step" if step is None else f"at step {step}"
        print(f"Stopped {where}: {reason} (code {code}); logs: {folder}/attempts", file=sys.stderr)
    return code


def errors(config: dict[str, Any], since: float) -> int:
    """Print why the newest attempt has crashed: the first error, and which ranks have left none."""
    attempts = Path(config["job"]["dump_folder"]) / "attempts"
    with suppress(OSError, ValueError, KeyError):  # of a rank that was asked to stop because another had crashed
        if json.loads((attempts.parent / "exit.json").read_text(encoding="utf-8"))["step"] is None:
            (attempts.parent / "exit.json").unlink()
    found = first_since(attempts, since)
    if found is None:
        where = f"in {attempts}: it was killed, or its error stands above and could not be written"
        print(f"The run has crashed, and no rank has left an error {where}", file=sys.stderr)
        return 0
    folder, first, ranks = found
    if first["phase"] == "config":  # nothing has started: the launcher's own check had less to go by
        write_exit(config["job"]["dump_folder"], ExitCode.BAD_CONFIG.reason, ExitCode.BAD_CONFIG, step=None)
        print(in_words(first), file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    words = [f"FIRST ERROR of {len(ranks)} (all: {folder}/errors): {in_words(first)}"]
    seen = {int(path.stem.removeprefix("rank-")) for path in folder.glob("heartbeat/rank-*.json")}
    silent = seen - ranks
    code = 0
    if silent:
        shown = ", ".join(map(str, sorted(silent)[:32])) + f" and {len(silent) - 32} more" * (len(silent) > 32)
        silence = f"NO ERROR of rank {shown}: killed (for its memory? see dmesg), or it hung and was killed at the end"
        is_consequence = re.search(PEER_LOST, first["traceback"]) is not None
        words.insert(len(words) if is_consequence else 0, silence)
        if is_consequence:
            code = ExitCode.LOST_PEER
            write_exit(config["job"]["dump_folder"], code.reason, code, first["step"])
    print("\n".join(words), file=sys.stderr)
    return code


def first_since(attempts: Path, since: float) -> tuple[Path, dict[str, Any], set[int]] | None:
    """Of the newest start that has left errors since then: its folder, the first of them, and which ranks have left one.

    Every node asks, and of thousands of ranks there are thousands of records: of a start that came far enough to have a
    number, only the first is read.
    """
    found = []
    for folder in sorted(attempts.glob("[1-9]*"), key=lambda folder: int(folder.name), reverse=True):
        first = first_error(folder) or min(errors_of(folder), key=itemgetter("time"), default=None)
        if first is not None:
            ranks = {int(path.stem.removeprefix("rank-")) for path in folder.glob("errors/rank-*.json")}
            found += [(folder, first, ranks)] if first["time"] >= since else []
            break
    early = [record for record in errors_of(attempts / "0") if record["time"] >= since]
    if early:
        found.append((attempts / "0", min(early, key=itemgetter("time")), {record["rank"] for record in early}))
    return max(found, key=lambda one: one[1]["time"], default=None)


def last_words(config: dict[str, Any], folder: Path, command: str, typed_in: Path, last_step: int) -> list[str]:
    """Three lines: where everything is, how to resume, how to generate a sample."""
    metrics, elsewhere = config["metrics"], Path.cwd() != typed_in.resolve()
    folder = folder.absolute() if elsewhere else folder
    checkpoint = config["checkpoint"]  # switched off, what lies there is an older run's
    if checkpoint.get("load_step", -1) >= 0:  # with more steps it is another command, and would go back once more
        command += " --checkpoint.load_step=-1"
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
    return f"Resume ({what}): {command} --training.steps {2 * wanted}"


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
        case ["clear"]:
            return clear(config)
        case ["report", command, typed_in]:
            return report(config, command, Path(typed_in))
        case ["errors", since]:
            return errors(config, float(since))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
