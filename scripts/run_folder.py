"""What run_train.sh does in a run's folder before and after torchrun. The resolved config comes on standard input.

python scripts/run_folder.py clear            removes the exit.json of an earlier attempt; prints the run's folder
python scripts/run_folder.py report COMMAND   exits with the code in exit.json. After a finished run it prints where
                                              things are, how to resume (COMMAND: what was typed) and how to sample
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.resilience.exit_codes import ExitCode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NO_EXIT_FILE = 1
ROOT = Path(__file__).resolve().parent.parent


def clear(config: dict[str, Any]) -> int:
    """An old exit.json must not be taken for the outcome of the run that starts now."""
    folder = Path(config["job"]["dump_folder"])
    (folder / "exit.json").unlink(missing_ok=True)
    print(folder)
    return 0


def report(config: dict[str, Any], command: str) -> int:
    """Print how the run ended; the code to return for it."""
    folder = Path(config["job"]["dump_folder"])
    try:
        end = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
        code, reason, step = int(end["code"]), end["reason"], end["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder / 'exit.json'} does not say how the run has ended: {error}", file=sys.stderr)
        return NO_EXIT_FILE
    if code == ExitCode.DONE:
        print("\n".join(last_words(config, folder, command)))
    else:
        print(f"Stopped at step {step}: {reason} (code {code}); logs: {folder}/attempts", file=sys.stderr)
    return code


def last_words(config: dict[str, Any], folder: Path, command: str) -> list[str]:
    """Three lines: where everything is, how to resume, how to generate a sample."""
    steps = published_steps(folder / config["checkpoint"]["folder"])
    newest = str(steps[-1].path) if steps else "none (checkpoint.enable is off)"
    metrics = config["metrics"]
    board = f"tensorboard --logdir {folder / metrics['save_tb_folder']}"
    if not metrics["enable_tensorboard"]:
        board = "off (metrics.enable_tensorboard)"
    python = os.path.relpath(sys.executable) if sys.executable.startswith(str(ROOT)) else sys.executable
    generate = [python, os.path.relpath(ROOT / "scripts" / "generate.py"), newest, "--prompt", "ROMEO:"]
    resume, sample = "needs a checkpoint: --checkpoint.enable", "needs a checkpoint"
    if steps:
        more = 2 * int(config["training"]["steps"])
        resume, sample = f"{command} --training.steps {more}", shlex.join(generate)
    return [
        f"Logs: {folder}/attempts, {folder}/metrics.jsonl | Checkpoint: {newest} | TensorBoard: {board}",
        f"Resume (the same command, more steps): {resume}",
        f"Sample: {sample}",
    ]


def main(arguments: list[str]) -> int:
    config = tomllib.loads(sys.stdin.read())
    match arguments:
        case ["clear"]:
            return clear(config)
        case ["report", command]:
            return report(config, command)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
