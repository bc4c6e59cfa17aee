"""Decide what a Slurm job does before and after its run, from the run directory.

train.slurm calls this program with a resolved configuration on standard input, such as
    python -m torchtitan_like.slurm.job before < outputs/config.toml
    python -m torchtitan_like.slurm.job after 0 75 < outputs/config.toml

before  Prints the step to continue from (0: a new run), or `none` if the last step is done or the
        kill switch exists. Removes the exit.json of an earlier attempt. Returns 0.
after   Prints the exit code of the job: the code in exit.json, or else 1. Returns 0 if the job is
        over, and 75 if it should be queued again. Variables: REQUEUE, MAX_STALLED_STARTS,
        SLURM_JOB_ID, SLURM_ARRAY_JOB_ID.

Both return 2 for wrong arguments, 78 for wrong input, and 74 for an unreadable file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.report.state import find_state
from torchtitan_like.util.exit_codes import CRASH, WORTH_A_RETRY, WRONG_INPUT, ExitCode
from torchtitan_like.util.output import show_error, show_problem
from torchtitan_like.util.reading import INTEGER, check_kinds, read_json
from torchtitan_like.util.run_directory import EXIT, STARTS, parse_config

NEEDED = (
    ("job", "dump_folder"),
    ("training", "steps"),
    ("checkpoint", "enable"),
    ("checkpoint", "folder"),
    ("resilience", "kill_switch_path"),
)


def read_job_config(stream: TextIO) -> dict[str, Any]:
    """Read a resolved configuration. Raises ValueError unless it has all settings of a job."""
    try:
        config = parse_config(stream.read())
        for section, key in NEEDED:
            if key not in config.get(section, {}):
                raise ValueError(f"{section}.{key} is missing")
    except ValueError as error:
        raise ValueError(
            f"The standard input is not a resolved configuration: {error}. Expected the output of "
            "titan check, or the config.toml of a run. Send it, as train.slurm does."
        ) from error
    return config


def before(config: dict[str, Any]) -> int:
    """Print the step to continue from, or `none`. Returns 0.

    Builds nothing, so that the tasks of a queue end in seconds. Raises ValueError if
    MAX_STALLED_STARTS is not a number, CheckpointError, OSError.
    """
    _max_stalled_starts()  # an error now, not after the run
    switch = _kill_switch(config)
    step = _newest_step(config)
    last = int(config["training"]["steps"])
    goes_back = config["checkpoint"].get("load_step", -1) >= 0  # the run itself knows its end
    if switch.exists():
        print("none")
        show_error(f"Not starting: the kill switch {switch} exists")
    elif step >= last and not goes_back:
        print("none")
        show_error(f"Nothing to do: step {step} of {last} is done already")
    else:
        print(step)
        if not os.environ.get("DRY_RUN"):
            (_run_folder(config) / EXIT).unlink(missing_ok=True)
    return 0


def after(config: dict[str, Any], first: int, srun_code: int) -> int:
    """Print the exit code of the job. Returns 0 if it is over, and 75 to queue it again.

    first: the step that the job continued from. Raises ValueError if MAX_STALLED_STARTS is not a number,
    CheckpointError.
    """
    folder = _run_folder(config)
    step = _newest_step(config)
    code, state = _code_of_run(folder, srun_code)
    num_stalled = 0 if step > first else _count_stalled_starts(folder) + 1
    uncounted = ""
    try:
        _write_starts(folder, num_stalled)
    except OSError as error:  # a run cannot write either; without a count it would start forever
        uncounted = str(error)
    reason = _reason_to_end(config, code, num_stalled, uncounted)
    decision = f"the job ends: {reason}" if reason else "the job is queued again"
    show_error(f"The run is {state}. Its newest checkpoint is of step {step}; {decision}.")
    print(code)
    return 0 if reason else int(ExitCode.REQUEUE)


def _code_of_run(folder: Path, srun_code: int) -> tuple[int, str]:
    """Return the run's exit code, and its state."""
    # A rank rejected the arguments or the configuration. Another rank that waited may have written
    # exit.json.
    if srun_code in (WRONG_INPUT, ExitCode.BAD_CONFIG):
        return srun_code, f"rejected by a rank (code {srun_code})"
    state = find_state(folder, time.time())
    if state.end is None:  # srun's other codes are not codes of the run
        return CRASH, f"{state.line} (no exit.json; srun returned {srun_code})"
    return state.end.code, state.line


def _reason_to_end(
    config: dict[str, Any], code: int, num_stalled: int, uncounted: str
) -> str | None:
    """Return why the job is not queued again; None if it is."""
    switch = _kill_switch(config)
    max_stalled = _max_stalled_starts()
    starts = (
        f"{num_stalled} starts in a row have saved no new checkpoint "
        f"(MAX_STALLED_STARTS={max_stalled})"
    )
    reasons = {
        "nothing is left to do": code == ExitCode.DONE,
        "a retry would end the same way": code not in WORTH_A_RETRY,
        f"the kill switch {switch} exists": switch.exists(),
        "the next task of the array continues": "SLURM_ARRAY_JOB_ID" in os.environ,
        "REQUEUE=0": os.environ.get("REQUEUE", "1") == "0",
        starts: num_stalled >= max_stalled,
        f"starts without progress cannot be counted: {uncounted}": num_stalled > 0
        and bool(uncounted),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _max_stalled_starts() -> int:
    text = os.environ.get("MAX_STALLED_STARTS", "3")
    if not text.isdecimal():
        raise ValueError(
            f"MAX_STALLED_STARTS is {text!r}. Expected a number of starts. Correct it."
        )
    return int(text)


def _run_folder(config: dict[str, Any]) -> Path:
    return Path(config["job"]["dump_folder"])


def _kill_switch(config: dict[str, Any]) -> Path:
    return _run_folder(config).absolute() / str(config["resilience"]["kill_switch_path"])


def _newest_step(config: dict[str, Any]) -> int:
    """Return the newest published step; 0 if there is none."""
    checkpoint = config["checkpoint"]
    if not checkpoint["enable"]:
        return 0
    steps = published_steps(_run_folder(config) / checkpoint["folder"])
    return steps[-1].step if steps else 0


def _count_stalled_starts(folder: Path) -> int:
    """Return how many consecutive starts of this job have saved no new checkpoint."""
    try:
        content = read_json(folder / STARTS)
        check_kinds(content, {"stalled_starts": INTEGER})
    except (OSError, ValueError, AttributeError):
        return 0
    is_of_this_job = content.get("job") == os.environ.get("SLURM_JOB_ID")
    return int(content.get("stalled_starts") or 0) if is_of_this_job else 0


def _write_starts(folder: Path, num_stalled: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"job": os.environ.get("SLURM_JOB_ID"), "stalled_starts": num_stalled})
    (folder / STARTS).write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_like.slurm.job",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("before", help="print the step to continue from")
    child = verbs.add_parser("after", help="decide whether the job is queued again")
    child.add_argument("step", type=int, metavar="STEP", help="what `before` printed")
    child.add_argument("code", type=int, metavar="CODE", help="the exit code of srun")
    arguments = parser.parse_args(words)
    try:
        config = read_job_config(sys.stdin)
        if arguments.verb == "before":
            return before(config)
        return after(config, arguments.step, arguments.code)
    except ValueError as error:
        show_problem(error)
        return int(ExitCode.BAD_CONFIG)
    except (CheckpointError, OSError) as error:
        show_problem(error)
        return int(ExitCode.STORAGE)


if __name__ == "__main__":
    sys.exit(main())
