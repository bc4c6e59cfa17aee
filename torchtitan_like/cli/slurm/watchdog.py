"""`titan slurm watchdog`: check once that a job runs, a log grows and a disk has space."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import catch_value_errors

if TYPE_CHECKING:
    from torchtitan_like.slurm.watchdog import Observation

ALERT = 1


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
