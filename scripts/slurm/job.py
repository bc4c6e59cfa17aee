"""What a Slurm job does before and after its run. The resolved config comes on standard input.

python scripts/slurm/job.py before
    prints the step that the run would continue from (0: a new run), or "none" when there is nothing to do. Removes the
    exit.json of an earlier attempt
python scripts/slurm/job.py after STEP CODE
    prints the code the job should end with: that of exit.json, or else CODE, srun's. Returns 0 when the job is over, and
    75 when it should be queued again. STEP is what `before` has printed

Environment: REQUEUE, MAX_IN_VAIN (see train.slurm), SLURM_JOB_ID, SLURM_ARRAY_JOB_ID.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.util.exit_codes import ExitCode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CRASH = 1
# Ends after which the same command may get further; every other one needs a person, or nothing.
WORTH_A_RETRY = (CRASH, ExitCode.LOST_PEER, ExitCode.STORAGE, ExitCode.REQUEUE)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    config = tomllib.loads(sys.stdin.read())
    match arguments:
        case ["before"]:
            return before(config)
        case ["after", step, code]:
            return after(config, int(step), int(code))
    print(__doc__, file=sys.stderr)
    return 2


def before(config: dict[str, Any]) -> int:
    """Is there anything to do? Nothing is built to find out: the tasks of a queue end in seconds."""
    folder, switch, step = folder_of(config), kill_switch(config), newest_step(config)
    wanted = int(config["training"]["steps"])
    goes_back = config["checkpoint"].get("load_step", -1) >= 0  # such a run knows itself when it is done
    if switch.exists():
        print("none")
        print(f"Nothing is started: {switch} is there", file=sys.stderr)
    elif step >= wanted and not goes_back:
        print("none")
        print(f"Nothing to do: step {step} of {wanted} is done already", file=sys.stderr)
    else:
        print(step)
        if not os.environ.get("DRY_RUN"):
            (folder / "exit.json").unlink(missing_ok=True)
    return 0


def after(config: dict[str, Any], first: int, srun_code: int) -> int:
    """How has the run ended, and is another start worth it?"""
    folder, step, switch = folder_of(config), newest_step(config), kill_switch(config)
    if srun_code == ExitCode.BAD_CONFIG:  # a rank has refused it; one that had to wait for that rank may say otherwise
        code, how = srun_code, f"code {srun_code}"
    else:
        try:
            code = int(json.loads((folder / "exit.json").read_text(encoding="utf-8"))["code"])
            how = f"code {code}"
        except (OSError, ValueError, KeyError, TypeError):
            # Nobody could leave a word, and srun's other codes are not the run's.
            code, how = CRASH, f"code {CRASH}, without an exit.json (srun returned {srun_code})"
    in_vain, uncounted = 0 if step > first else starts_in_vain(folder) + 1, ""
    try:
        write_starts(folder, in_vain)
    except OSError as error:  # where nothing can be written no run can, and without a count it would start for ever
        uncounted = str(error)
    most = int(os.environ.get("MAX_IN_VAIN", "3"))
    ends = {
        "nothing is left to do": code == ExitCode.DONE,
        "a retry would end the same way": code not in WORTH_A_RETRY,
        f"{switch} is there": switch.exists(),
        "the next task of the array continues": "SLURM_ARRAY_JOB_ID" in os.environ,
        "REQUEUE=0": os.environ.get("REQUEUE", "1") == "0",
        f"{in_vain} starts in a row have brought no new checkpoint (MAX_IN_VAIN={most})": in_vain >= most,
        f"starts in vain cannot be counted, {uncounted}": in_vain > 0 and bool(uncounted),
    }
    reason = next((reason for reason, holds in ends.items() if holds), None)
    decision = f"the job ends: {reason}" if reason else "the job is queued again"
    print(f"The run has ended with {how}, its newest checkpoint is of step {step}; {decision}.", file=sys.stderr)
    print(code)
    return 0 if reason else int(ExitCode.REQUEUE)


def folder_of(config: dict[str, Any]) -> Path:
    return Path(config["job"]["dump_folder"])


def kill_switch(config: dict[str, Any]) -> Path:
    return folder_of(config).absolute() / str(config["resilience"]["kill_switch_path"])


def newest_step(config: dict[str, Any]) -> int:
    """The newest step that is published; 0 without any."""
    checkpoint = config["checkpoint"]
    steps = published_steps(folder_of(config) / checkpoint["folder"]) if checkpoint["enable"] else []
    return steps[-1].step if steps else 0


# ---- starts in a row without a new checkpoint, counted for each job anew


def starts_in_vain(folder: Path) -> int:
    try:
        noted = json.loads((folder / "slurm.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return int(noted["in_vain"]) if noted["job"] == os.environ.get("SLURM_JOB_ID") else 0


def write_starts(folder: Path, in_vain: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"job": os.environ.get("SLURM_JOB_ID"), "in_vain": in_vain})
    (folder / "slurm.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
