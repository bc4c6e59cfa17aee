"""`titan slurm`: write batch scripts, watch jobs, and decide what a job does next."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.cli.common import catch_value_errors, show_problem
from torchtitan_like.util.exit_codes import ExitCode

if TYPE_CHECKING:
    from torchtitan_like.slurm.watchdog import Observation

ALERT = 1


# ---- titan slurm init


def configure_init(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder for the scripts, which all nodes must see"
    )
    parser.epilog = (
        "Writes train.slurm, job arrays and chains, watchdog, cron and node checks, for you to\n"
        "edit. Each explains itself with --help. env.sh makes `titan` available to all of them.\n"
        "Overwrites nothing: returns 2 if one of the files exists. Then:\n"
        "  sbatch --nodes=8 --gpus-per-node=8 DIR/train.slurm --job.config_file X.toml\n\n"
        "example: titan slurm init slurm"
    )


def run_init(arguments: argparse.Namespace) -> int:
    """Write the scripts. Returns the exit code."""
    from torchtitan_like.slurm.scaffold import write_scripts

    def action() -> int:
        for path in write_scripts(arguments.folder):
            print(path)
        return 0

    return catch_value_errors(action)


# ---- titan slurm watchdog


def configure_watchdog(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--log", type=Path, metavar="FILE", help="also append each line to FILE")
    common.add_argument("--notify", metavar="COMMAND", help="gets an alert on its standard input")
    common.add_argument(
        "--dry-run", action="store_true", help="print the notify command, do not run it"
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    job = kinds.add_parser("job", parents=[common], help="is a job running or queued?")
    job.add_argument("name", help="the job's name (sbatch --job-name)")
    log = kinds.add_parser("log", parents=[common], help="has a file grown recently?")
    log.add_argument("file", type=Path)
    log.add_argument("--max-silence", type=float, default=30, metavar="MINUTES")
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
    parser.epilog = (
        "Prints one line, from a batch job or cron. Returns 0 if all is well, 1 for an alert, and\n"
        "2 if it cannot be determined. --free-command is a site's quota tool. Many file systems\n"
        "slow down from 80 % on: leave room. --notify is a command such as\n"
        "`mail -s training you@example.org` or `python DIR/notify.py --webhook`.\n\n"
        "example: titan slurm watchdog log outputs/metrics.jsonl --max-silence 60"
    )


def run_watchdog(arguments: argparse.Namespace) -> int:
    """Observe once, and notify. Returns the exit code."""
    from torchtitan_like.slurm.templates.notify import run_command

    def action() -> int:
        observations = _observe(arguments)
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

    return catch_value_errors(action)


def _observe(arguments: argparse.Namespace) -> list[Observation]:
    from torchtitan_like.slurm.watchdog import Limits, observe_disk, observe_job, observe_log

    if arguments.kind == "job":
        return [observe_job(arguments.name)]
    if arguments.kind == "log":
        return [observe_log(arguments.file, arguments.max_silence, time.time())]
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


# ---- titan slurm before and after


def configure_before(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "train.slurm calls this command. Reads a resolved configuration from standard input.\n"
        "Prints the step to continue from (0: a new run), or `none` if the last step is done or\n"
        "the kill switch exists. Removes the exit.json of an earlier attempt. Returns 0, 78 for\n"
        "wrong input, or 74 for an unreadable file.\n\n"
        "example: titan slurm before < outputs/config.toml"
    )


def run_before(arguments: argparse.Namespace) -> int:
    """Print the step. Returns the exit code."""
    from torchtitan_like.slurm.job import before

    return _run_decision(before)


def configure_after(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("step", type=int, metavar="STEP", help="what `titan slurm before` printed")
    parser.add_argument("code", type=int, metavar="CODE", help="the exit code of srun")
    parser.epilog = (
        "train.slurm calls this command. Reads a resolved configuration from standard input.\n"
        "Prints the exit code of the job: the code in exit.json, or else 1. Returns 0 if the job is\n"
        "over, 75 if it should be queued again, 78 for wrong input, and 74 for an unreadable file.\n"
        "Variables: REQUEUE, MAX_STALLED_STARTS, SLURM_JOB_ID, SLURM_ARRAY_JOB_ID.\n\n"
        "example: titan slurm after 0 75 < outputs/config.toml"
    )


def run_after(arguments: argparse.Namespace) -> int:
    """Print the code of the job. Returns the exit code."""
    from torchtitan_like.slurm.job import after

    return _run_decision(lambda config: after(config, arguments.step, arguments.code))


def _run_decision(decide: Callable[[dict[str, Any]], int]) -> int:
    """Call `decide` with the configuration on standard input, and return its code.

    Print expected errors, and return 78 for wrong input, or 74 for an unreadable file.
    """
    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.slurm.job import read_job_config

    try:
        return decide(read_job_config(sys.stdin))
    except ValueError as error:
        show_problem(error)
        return int(ExitCode.BAD_CONFIG)
    except (CheckpointError, OSError) as error:
        show_problem(error)
        return int(ExitCode.STORAGE)
