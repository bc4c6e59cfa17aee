"""Observe a run from outside, from a batch job or cron: its job, its state, and its disk.

    python -m torchtitan_like.slurm.watchdog run outputs --max-silence 60

Prints one line. Returns 0 if all is well, 1 for an alert, and 2 if it cannot be determined.
--free-command is a site's quota tool. Many file systems slow down from 80 % on: leave room.
--notify is a command such as `mail -s training you@example.org` or
`python DIR/notify.py --webhook`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.report.disk import (
    Space,
    checkpoints_left,
    disk_usage,
    free_space,
    newest_checkpoint,
)
from torchtitan_like.report.state import find_state, is_run
from torchtitan_like.slurm.templates.notify import run_command
from torchtitan_like.util.exit_codes import WORTH_A_RETRY, WRONG_INPUT, ExitCode
from torchtitan_like.util.output import show_problem
from torchtitan_like.util.units import GIB

ALERT = 1


@dataclass(frozen=True)
class Observation:
    """A line for the log. is_alert: the line is also sent to a person."""

    message: str
    is_alert: bool


@dataclass(frozen=True)
class Limits:
    """What a disk must have left. days: of checkpoints, at the interval of the last two."""

    free_gib: float = 0
    free_inodes: int = 0
    checkpoints: int = 0
    days: float = 0


def observe_job(
    name: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Observation:
    """Return whether Slurm runs or queues a job `name` of this user. Raises OSError."""
    command = ["squeue", "--noheader", "--me", f"--name={name}", "--format=%i %T"]
    done = run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
    jobs = [line.split() for line in done.stdout.splitlines() if line.strip()]
    over = ("COMPLETING", "COMPLETED")
    alive = [f"{job} {state.lower()}" for job, state in jobs if state not in over]
    return Observation(f"job {name}: {', '.join(alive) or 'neither running nor queued'}", not alive)


def observe_run(run: Path, max_silence: float, now: float) -> Observation:
    """Return the state of a run, as `titan run ls` shows it.

    It is an alert if a person must act: after an end that a new start does not help, and after
    `max_silence` minutes without a sign of a run that is not done.
    """
    if not is_run(run):
        return Observation(f"run {run}: no run has started in this folder", True)
    state = find_state(run, now)
    if state.updated is None:
        return Observation(f"run {run}: {state.line}", True)
    silence = (now - state.updated) / 60
    message = f"run {run}: {state.line}; last sign {silence:.0f} min ago (at most {max_silence:g})"
    if state.end is None or state.end.code in WORTH_A_RETRY:
        return Observation(message, silence > max_silence)
    return Observation(message, state.end.code != ExitCode.DONE)


def observe_disk(
    path: Path, limits: Limits, free_command: str | None, quota_gib: float | None
) -> Observation:
    """Return whether bytes, inodes and room for checkpoints are left at `path`.

    free_command: prints free bytes [and inodes]. quota_gib: GiB that `path` may contain.
    Raises OSError, ValueError.
    """
    free = space_of_command(free_command) if free_command else free_space(path)
    if quota_gib is not None:
        left = int(quota_gib * GIB) - disk_usage(path)[0]
        free = Space(min(free.num_bytes, left), free.num_inodes)
    facts = [f"{free.num_bytes / GIB:,.1f} GiB free (at least {limits.free_gib:g})"]
    alerts = [free.num_bytes < limits.free_gib * GIB]
    if free.num_inodes is not None:
        facts.append(f"{free.num_inodes:,} inodes free (at least {limits.free_inodes:,})")
        alerts.append(free.num_inodes < limits.free_inodes)
    size = newest_checkpoint(path)
    if size is not None:
        count = checkpoints_left(free, size)
        facts.append(f"{count:,} checkpoints left (at least {limits.checkpoints})")
        alerts.append(count < limits.checkpoints)
        if size.seconds:
            days = count * size.seconds / 86400
            facts.append(f"{days:.1f} days of checkpoints left (at least {limits.days:g})")
            alerts.append(days < limits.days)
    return Observation(f"disk {path}: {', '.join(facts)}", any(alerts))


def space_of_command(command: str) -> Space:
    """Return the free bytes and inodes that `command` prints. Raises ValueError."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    numbers = done.stdout.split()
    if (
        done.returncode != 0
        or not 1 <= len(numbers) <= 2
        or not all(word.isdecimal() for word in numbers)
    ):
        raise ValueError(
            f"{command}: printed {done.stdout + done.stderr!r}. Expected the free bytes [and free "
            "inodes]. Correct --free-command."
        )
    return Space(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def main(words: Sequence[str] | None = None) -> int:
    """Observe once, and notify. Returns the exit code."""
    arguments = _parser().parse_args(words)
    try:
        return _report(_observe(arguments), arguments)
    except (OSError, ValueError) as error:
        show_problem(error)
        return WRONG_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_like.slurm.watchdog",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--log", type=Path, metavar="FILE", help="also append each line to FILE")
    common.add_argument("--notify", metavar="COMMAND", help="gets an alert on its standard input")
    common.add_argument(
        "--dry-run", action="store_true", help="print the notify command, do not run it"
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    job = kinds.add_parser("job", parents=[common], help="is a job running or queued?")
    job.add_argument("name", help="the job's name (sbatch --job-name)")
    run = kinds.add_parser("run", parents=[common], help="does a run move, or is it done?")
    run.add_argument("run", type=Path, help="the folder of the run (job.dump_folder)")
    run.add_argument("--max-silence", type=float, default=30, metavar="MINUTES")
    disk = kinds.add_parser("disk", parents=[common], help="is there room for checkpoints?")
    disk.add_argument("path", type=Path, nargs="+", help="a run's folder, or any on the disk")
    disk.add_argument("--min-free-gib", type=float, default=0, metavar="N")
    disk.add_argument("--min-free-inodes", type=int, default=0, metavar="N")
    disk.add_argument("--min-saves", type=int, default=0, metavar="N", help="checkpoints that fit")
    disk.add_argument(
        "--min-days", type=float, default=0, metavar="N", help="days of checkpoints that fit"
    )
    disk.add_argument(
        "--free-command", metavar="COMMAND", help="prints the free bytes [and free inodes]"
    )
    disk.add_argument("--quota-gib", type=float, metavar="N", help="GiB that each path may contain")
    return parser


def _observe(arguments: argparse.Namespace) -> list[Observation]:
    if arguments.kind == "job":
        return [observe_job(arguments.name)]
    if arguments.kind == "run":
        return [observe_run(arguments.run, arguments.max_silence, time.time())]
    limits = Limits(
        free_gib=arguments.min_free_gib,
        free_inodes=arguments.min_free_inodes,
        checkpoints=arguments.min_saves,
        days=arguments.min_days,
    )
    return [
        observe_disk(path, limits, arguments.free_command, arguments.quota_gib)
        for path in arguments.path
    ]


def _report(observations: Sequence[Observation], arguments: argparse.Namespace) -> int:
    lines = [("ALERT " if one.is_alert else "") + one.message for one in observations]
    print("\n".join(lines))
    if arguments.log is not None:
        now = time.strftime("%F %T")
        with open(arguments.log, "a", encoding="utf-8") as log:
            log.writelines(f"{now} watchdog {line}\n" for line in lines)
    alerts = [one.message for one in observations if one.is_alert]
    if alerts and arguments.notify:
        if arguments.dry_run:
            print(f"would run: {arguments.notify}")
        else:
            run_command(arguments.notify, "\n".join(alerts))
    return ALERT if alerts else 0


if __name__ == "__main__":
    sys.exit(main())
